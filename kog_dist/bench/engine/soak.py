"""`kog-bench soak`: thousands of mixed requests in a row; each stream is compared with a replay, and nothing may stay behind."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kog_dist.bench.engine.session import EngineSession, TimedOut, engine_session, until
from kog_dist.bench.engine.soak_client import Record, SoakClient
from kog_dist.bench.engine.soak_replay import compare, compare_rounded, replay_of
from kog_dist.bench.engine.soak_requests import PREFIX_LENGTHS, RequestMix, SoakRequest
from kog_dist.bench.fakes.tiny_delta_model import CONFIG, ON_GPUS, write_tiny_delta_model
from kog_dist.bench.fakes.tiny_model import TINY, TINY_ON_GPUS, write_tiny_model
from kog_dist.bench.report import finish, machine
from kog_dist.config import LaunchConfig
from kog_dist.decode.cpu.pool_sizes import BLOCK_TOKENS, bytes_of_states, pool_slots
from kog_dist.decode.plan.recipes import state_bytes
from kog_dist.hardware.gpus import read_inventory
from kog_dist.hardware.visible import visible_gpus
from kog_dist.launch.target import CPU_KV_CACHES, CPU_PARALLEL, model_folder
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, StatusReport
from kog_dist.rpc.transport import Access

MORE_RSS_KB = 5 * 1024  # that a process may have grown by; in file descriptors: nothing
MORE_MAPPINGS = 4
LATE_GRAMMARS = CPU_PARALLEL - 1  # processes that slots have for masks, from the first request on that needs one more
MORE_GPU_KB = 4 * 1024
QUEUE_LIMIT, CLIENT_QUEUE_LIMIT = 13, 3  # small, so that requests are refused as well
_WARM_UP = 0.2  # of all requests, before processes are measured the first time
_MOST_AT_ONCE = 3
_IDLE_S = 5.0
_SETTLE_S, _LOOKS = 1.0, 10  # of processes that are measured: a text that nobody waits for any more may still be read
_STALL_S = 10.0  # many clients on few cores are slow; who judges a silent process is not what is measured here
_SHOWN = 20
LONG_CONTEXT, LONG_PREFIXES = 768, (150, 400)  # tokens
LONG_BLOCKS = 6  # for kept prefixes: less than the longest sequence has
DELTA_PREFIXES, NUM_STATES = (150, 900), 14  # room for fewer copies of states than are made
LONG_ON_GPUS = replace(TINY_ON_GPUS, delay=0, own_head_dim=64, sliding_window=None, window_layers=(), max_context=2048)
DRAFTING_ON_GPUS = replace(TINY_ON_GPUS, delay=0)  # Laneformers have no drafts there
LONG_PREFIXES_ON_GPUS = (300, 1200)  # of blocks of 128 or 256 tokens
LONG_REPLAY_EVERY, _ALL_REPLAYED = 8, 1000
_START_S = 150.0  # kernels may have to be compiled
_ENDED_S = 20.0


@dataclass(frozen=True, slots=True)
class SoakedEngine:
    """What is soaked. `flags` are those of the launcher, `num_blocks` what it must then say that it has for kept prefixes."""

    name: str
    spec: ModelSpec
    folder: Path | None = None  # None: random weights of the spec
    on_gpus: bool = False
    prefix_lengths: tuple[int, int] = PREFIX_LENGTHS
    flags: tuple[str, ...] = ()
    num_blocks: int | None = None
    replay_every: int = 1  # streams; the others are compared with nothing
    repeats: bool = False  # see RequestMix
    has_delta_nets: bool = False

    @classmethod
    def tiny(cls, *, on_gpus: bool = False, repeats: bool = False) -> SoakedEngine:
        """Short prompts, and room for all that is kept. `repeats`: see RequestMix; a model that has drafts."""
        of_gpus = DRAFTING_ON_GPUS if repeats else TINY_ON_GPUS
        return cls("tiny", of_gpus if on_gpus else TINY, on_gpus=on_gpus)

    @classmethod
    def long(cls, ranks: int, num_requests: int, *, is_demo: bool = False) -> SoakedEngine:
        """Prompts of several blocks on CPU ranks, and room for few of them, so that blocks are forgotten all the time."""
        folder = model_folder(LaunchConfig())[0] if is_demo else None
        spec = replace(TINY, max_context=LONG_CONTEXT) if folder is None else open_checkpoint(folder, verify=False).spec
        token_bytes = 2 * spec.num_layers * spec.num_kv_heads // ranks * spec.head_dim * 4
        gib = (LONG_BLOCKS + 0.5) * BLOCK_TOKENS * token_bytes / 2**30
        flags = ("--kv-dtype=float32", "--kv-caches=1", f"--prefix-cache={gib:.12f}")
        every = 1 if num_requests <= _ALL_REPLAYED else LONG_REPLAY_EVERY
        return cls("demo" if is_demo else "tiny", spec, folder, False, LONG_PREFIXES, flags, LONG_BLOCKS, every)

    @classmethod
    def delta_nets(cls, ranks: int) -> SoakedEngine:
        """Gated delta nets on CPU ranks, four at once; prompts begin alike for longer than copies of states are apart."""
        spec = read_config(CONFIG)
        num_bytes = bytes_of_states(NUM_STATES, state_bytes(spec) // ranks) + 4096
        num_blocks, _ = pool_slots(spec, spec.num_lanes // ranks, 4, num_bytes)
        flags = ("--kv-dtype=float32", f"--prefix-cache={num_bytes / 2**30:.12f}")
        return cls("tiny, delta nets", spec, None, False, DELTA_PREFIXES, flags, num_blocks, has_delta_nets=True)

    @classmethod
    def delta_nets_on_gpus(cls, gpus: int) -> SoakedEngine:
        """The same on GPUs, where four take turns; without prefill, so that what goes on behind copies has the same bits."""
        from kog_dist.workers.cuda.kernel_shape import KernelShape
        from kog_dist.workers.cuda.kv_blocks import net_bytes
        from kog_dist.workers.cuda.kv_blocks import pool_slots as slots_of

        spec = read_config(CONFIG | ON_GPUS)
        shape = KernelShape(spec, spec.lanes_of_rank(0, gpus), num_ranks=gpus)
        num_bytes = bytes_of_states(NUM_STATES, net_bytes(shape)) + 4096
        num_blocks, _ = slots_of(shape, num_bytes)
        flags = ("--prefill=off", "--parallel=4", "--kv-caches=4", f"--prefix-cache={num_bytes / 2**30:.12f}")
        return cls("tiny, delta nets", spec, None, True, DELTA_PREFIXES, flags, num_blocks, has_delta_nets=True)

    @classmethod
    def long_on_gpus(cls, gpus: int) -> SoakedEngine:
        """The same on GPUs, whose host has room for as few; with an INT4 KV cache. One residual stream: Laneformers keep none."""
        from kog_dist.workers.cuda.kernel_shape import KernelShape
        from kog_dist.workers.cuda.kv_blocks import block_bytes

        spec = LONG_ON_GPUS
        one = block_bytes(KernelShape(spec, spec.lanes_of_rank(0, gpus), num_ranks=gpus, kv_dtype="int4")) / 2**30
        room, host_room = (LONG_BLOCKS + 0.5) * one, (LONG_BLOCKS + 0.5) * one * gpus
        flags = ("--kv-dtype=int4", f"--prefix-cache={room:.12f}", f"--prefix-host={host_room:.12f}")
        return cls("tiny, one stream", spec, None, True, LONG_PREFIXES_ON_GPUS, flags, LONG_BLOCKS)


def run(engine: SoakedEngine, num_requests: int, ranks: int, num_clients: int, seed: int) -> bool:
    """Soak an engine; prints findings, then the JSON object. True: nothing was wrong."""
    before = machine()
    figures = soak(engine, num_requests, ranks, num_clients, seed)
    for finding in figures["findings"][:_SHOWN]:
        print(finding, flush=True)
    configuration: dict[str, object] = {
        "model": engine.name,
        "requests": num_requests,
        "gpus" if engine.on_gpus else "ranks": ranks,
        "clients": num_clients,
        "seed": seed,
        "context": engine.spec.max_context,
        "blocks": engine.num_blocks,
        "replay_every": engine.replay_every,
        "repeats": engine.repeats,
    }
    finish("soak", configuration, before, figures)
    return not figures["findings"]


def soak(engine: SoakedEngine, num_requests: int, ranks: int, num_clients: int, seed: int) -> dict[str, Any]:
    """The figures of a soak of `ranks` CPU ranks or GPUs; `findings` are sentences about what was wrong.

    Replays follow when the engine has ended: on one CPU rank, or on the same GPUs, whose prefill and decoding round differently.
    """
    on_gpus = engine.on_gpus
    limits = [f"--queue-limit={QUEUE_LIMIT}", f"--client-queue-limit={CLIENT_QUEUE_LIMIT}"]
    with TemporaryDirectory(prefix="kog-soak-") as folder:
        model, begin_s = engine.folder or Path(folder) / "model", time.monotonic()
        if engine.folder is None:
            if engine.has_delta_nets:
                write_tiny_delta_model(model, **(ON_GPUS if on_gpus else {}))
            else:
                write_tiny_model(model, engine.spec)
        is_exact = not on_gpus or engine.has_delta_nets
        mix = RequestMix(engine.spec, seed, kept_is_exact=is_exact, prefix_lengths=engine.prefix_lengths, repeats=engine.repeats)
        flags = [str(model), f"--stall-timeout={_STALL_S:g}", *([f"--gpus={ranks}"] if on_gpus else ["--device=cpu"])]
        checker = Checker(mix, engine.replay_every)
        with _engine([*flags, *limits, *engine.flags, *([] if on_gpus else [f"--ranks={ranks}"])], checker.findings) as (
            session,
            client,
        ):
            num_warm = max(1, round(_WARM_UP * num_requests))
            sizes: list[dict[str, dict[str, int]]] = []
            for num_in_phase in (num_warm, num_requests - num_warm):
                _ask_all(Access.from_folder(session.instance_folder), checker, num_in_phase, num_clients)
                report = _wait_idle(client, checker)
                sizes.append(_settled(session) | _gpu_memory(on_gpus=on_gpus))
                print(
                    f"{len(checker.records)} requests, {len(checker.findings)} findings",
                    *checker.findings[:_SHOWN],
                    sep="\n  ",
                    flush=True,
                )
        asked_s = round(time.monotonic() - begin_s, 1)
        replayed = [flag for flag in engine.flags if flag.startswith(("--kv-dtype", "--prefill"))] + (
            [] if on_gpus else ["--ranks=1"]
        )
        with _engine([*flags, *replayed], checker.findings) as (session, _):
            checker.replay(SoakClient(Access.from_folder(session.instance_folder)))
        counters = {name: getattr(report, name) for name in StatusReport.__slots__ if name.startswith("num_")}
        growth = {role: {name: sizes[1][role][name] - was for name, was in sizes[0][role].items()} for role in sizes[0]}
        checker.check_engine(counters, growth, 0 if on_gpus else _kv_caches_kb(engine.spec))
        if engine.num_blocks is not None and report.kept_slots != engine.num_blocks:
            checker.findings.append(
                f"the engine has {report.kept_slots} blocks for kept prefixes, {engine.num_blocks} were asked"
            )
        seconds = {"asked_s": asked_s, "seconds": round(time.monotonic() - begin_s, 1)}
        figures = checker.figures()
        if engine.repeats and not figures["drafted_tokens"]:
            checker.findings.append("no token was drafted")
        return {
            **figures,
            **seconds,
            "kept_blocks": report.kept_used,
            "kept_states": report.kept_states_used,
            "engine": counters,
            "growth": growth,
            "sizes": sizes[1],
        }


def _kv_caches_kb(spec: ModelSpec) -> int:
    """Of all KV caches of a CPU rank that has every lane."""
    values = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * spec.max_context
    return 4 * values * CPU_KV_CACHES // 1024


@contextmanager
def _engine(flags: list[str], findings: list[str]) -> Iterator[tuple[EngineSession, Client]]:
    """An engine that is ready, drained at the end; that it ends well, and leaves nothing, is checked."""
    with engine_session() as session:
        launcher = session.launch(*flags)
        with session.connect(_START_S) as client:
            yield session, client
        launcher.send_signal(signal.SIGTERM)
        if code := launcher.wait(_ENDED_S):
            findings.append(f"the launcher ended with {code}: {session.output()}")
        try:
            until(lambda: not session.leftovers(), _ENDED_S, lambda: f"left behind: {session.leftovers()}")
        except TimedOut as error:
            findings.append(str(error))


class Checker:
    """What clients have recorded; replays it on an engine that keeps no prefix; adds up what there is to report."""

    def __init__(self, mix: RequestMix, replay_every: int = 1) -> None:
        self.mix, self._replay_every = mix, replay_every
        self.findings: list[str] = []
        self.records: list[Record] = []
        self._ends: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()

    def take(self, record: Record) -> None:
        """Note one record."""
        self.records.append(record)
        self.findings += record.findings
        self._ends[_end_of(record)] += 1
        self._sums["tokens"] += len(record.token_ids)
        self._sums["waited_visibly"] += record.num_places > 1
        if isinstance(record.end, Done):
            self._sums["prompt_tokens"] += record.end.num_prompt_tokens
            self._sums["cached_tokens"] += record.end.num_cached_tokens
            self._sums["drafted_tokens"] += record.end.num_drafted_tokens
            self._sums["accepted_tokens"] += record.end.num_accepted_tokens
        if record.is_whole:
            self.mix.remember_answer(record.planned.message, record.token_ids)
        if record.is_whole and record.planned.message.prompt_ids is not None:
            self.mix.remember((*record.planned.message.prompt_ids, *record.token_ids))

    def replay(self, replayer: SoakClient) -> None:
        """Compare all records with their replays."""
        for record in self.records[:: self._replay_every]:
            if record.token_ids or record.is_whole:
                replay = replay_of(record, replayer)
                if self.mix.kept_is_exact or not record.planned.message.reuse_kv:
                    self.findings += compare(record, replay)
                else:
                    findings, num_ties = compare_rounded(record, replay, replayer)
                    self.findings += findings
                    self._sums["ties"] += num_ties
                self._sums["replayed"] += 1
                self._sums["replayed_tokens"] += len(replay.token_ids)
        replayer.close()

    def check_engine(self, counters: dict[str, int], growth: dict[str, dict[str, int]], kv_kb: int = 0) -> None:
        """Whether the engine's own books agree, and whether a process has grown. `kv_kb`: of KV caches, which a CPU rank takes as
        positions are written.
        """
        ends = ("num_completed", "num_cancelled", "num_expired", "num_failed", "num_refused")
        num_ended, num_vanished = sum(counters[name] for name in ends), self._ends["vanished"]
        num_records = len(self.records)
        if not num_records - num_vanished <= num_ended <= num_records:
            self.findings.append(f"the engine ended {num_ended} requests of {num_records}, of which {num_vanished} vanished")
        if counters["num_failed"]:
            self.findings.append(f"{counters['num_failed']} requests failed")
        limits = {"fds": 0, "mappings": MORE_MAPPINGS, "rss_kb": MORE_RSS_KB, "used_kb": MORE_GPU_KB}
        for role, more in growth.items():
            room = limits | {"rss_kb": MORE_RSS_KB + kv_kb * role.startswith("rank")}
            room["fds"] = LATE_GRAMMARS * (role == "coordinator")
            self.findings += [f"{role} has {count} more {name}" for name, count in more.items() if count > room[name]]

    def figures(self) -> dict[str, Any]:
        """What is reported."""
        return {"findings": self.findings, "ends": dict(sorted(self._ends.items())), **self._sums}


def _end_of(record: Record) -> str:
    if record.end is None:
        return "vanished"
    return record.end.finish_reason.value if isinstance(record.end, Done) else record.end.code.value


def _ask_all(access: Access, checker: Checker, num_requests: int, num_clients: int) -> None:
    """Let clients ask until so many requests have ended; all are noted when this returns."""
    records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
    lock, num_left = threading.Lock(), num_requests

    def take() -> list[SoakRequest]:
        nonlocal num_left
        with lock:
            count = min(num_left, 1 + num_left % _MOST_AT_ONCE)
            num_left -= count
            return [checker.mix.next() for _ in range(count)]

    def ask() -> None:
        try:
            client = SoakClient(access)
            while requests := take():
                for record in client.ask(requests):
                    records.put(record)
            client.close()
        except Exception as error:  # of whatever kind: without its end the soak would wait for ever
            checker.findings.append(f"a client ended with {type(error).__name__}: {error}")
        records.put(None)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    num_asking = num_clients
    while num_asking:
        record = records.get()
        if record is None:
            num_asking -= 1
        else:
            checker.take(record)
    for thread in threads:
        thread.join()


def _wait_idle(client: Client, checker: Checker) -> StatusReport:
    """The engine's report once nothing runs or waits, or when that did not come about."""

    def is_idle() -> bool:
        report = client.status()
        return report.running is None and not report.waiting

    try:
        until(is_idle, _IDLE_S, lambda: "requests still run or wait although no client is left")
    except TimedOut as error:
        checker.findings.append(str(error))
    return client.status()


def _settled(session: EngineSession) -> dict[str, dict[str, int]]:
    """The sizes of all processes that stay for a second: the least of several looks, which a leak cannot undercut."""
    looks: list[dict[str, dict[str, int]]] = []
    for _ in range(_LOOKS):
        looks.append({role: _size(pid) for role, pid in session.processes().items()})
        time.sleep(_SETTLE_S / _LOOKS)
    roles = [role for role in looks[0] if all(role in look for look in looks)]
    return {role: {name: min(look[role][name] for look in looks) for name in looks[0][role]} for role in roles}


def _size(pid: int) -> dict[str, int]:
    """File descriptors, mappings and resident memory of a process."""
    proc = Path(f"/proc/{pid}")
    pages = int((proc / "statm").read_text().split()[1])
    return {
        "fds": len(os.listdir(proc / "fd")),
        "mappings": len((proc / "maps").read_text().splitlines()),
        "rss_kb": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


def _gpu_memory(*, on_gpus: bool) -> dict[str, dict[str, int]]:
    """Memory of each visible GPU that is in use, whoever uses it."""
    gpus = visible_gpus(read_inventory().gpus, os.environ).gpus if on_gpus else ()
    return {f"GPU {gpu.index}": {"used_kb": (gpu.memory_bytes - gpu.free_bytes) // 1024} for gpu in gpus}
