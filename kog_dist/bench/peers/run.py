"""`kog-bench peers`: starts engines in turn, asks each the same, and says how fast each was, and where its answer was another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kog_dist.bench.engine.session import EngineSession, engine_session
from kog_dist.bench.peers.loads import PeerLoad
from kog_dist.bench.peers.peer import OWN, Peer, last_line
from kog_dist.bench.peers.rows import Variant, rows_of, table_of
from kog_dist.bench.report import finishing, machine
from kog_dist.bench.service.serve import ServeSettings, measured
from kog_dist.chat.wire import ServiceUrl
from kog_dist.errors import ConfigError, KogError, LaunchError, RequestFailed
from kog_dist.hardware.gpus import read_inventory
from kog_dist.hardware.visible import visible_gpus
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.quoting import printable, short
from kog_dist.records import dataclass
from kog_dist.rpc.output import write_out
from kog_dist.workers.coordinator.model_folder import ModelFolder

_ANSWER_S: Final = 1800.0
_STOP_S: Final = 30.0
_LOOK_S: Final = 0.2
_MOST_ERROR: Final = 300
_NO_NETWORK: Final = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What is measured. `model`: a folder or a GGUF file; `gguf`: the same for engines that read no other.

    `processes`: how often each engine is started, in turn with the others. `drafts`: also with drafts.
    """

    model: Path
    gguf: Path | None
    peers: Sequence[Peer]
    loads: Sequence[PeerLoad]
    devices: int
    on_gpus: bool
    drafts: bool = True
    processes: int = 1
    start_s: float = 900.0

    @property
    def slots(self) -> int:
        """Most requests at once."""
        return max(load.at_once for load in self.loads)

    @property
    def context(self) -> int:
        """Tokens of the longest request."""
        return max(load.context for load in self.loads)


def run(plan: PeerPlan) -> int:
    """Measure, print a table and the JSON object; returns how many rows have no figures."""
    before, rows = machine(), list[dict[str, Any]]()
    variants = [variant for peer in plan.peers for variant in _variants_of(peer, with_drafts=plan.drafts)]
    commands = dict[str, str]()
    configuration = {
        "model": str(plan.model),
        "gguf": str(plan.gguf or ""),
        "devices": plan.devices,
        "on_gpus": plan.on_gpus,
        "processes": plan.processes,
        "loads": [load.label for load in plan.loads],
        "commands": commands,
    }
    with finishing("peers", configuration, before, rows):
        try:
            for process in range(plan.processes):
                for variant in variants:
                    if not variant.error:
                        _measure(plan, variant, process, commands)
        finally:
            rows += rows_of(plan.loads, variants, tokenizer_of(plan.model))
        write_out(table_of(rows) + "\n")
    return sum(bool(row["error"]) for row in rows)


def _variants_of(peer: Peer, *, with_drafts: bool) -> list[Variant]:
    """An engine without drafts, and with each kind of them; all with the same error if it is not there."""
    version = error = ""
    try:
        version = peer.found_version()
    except LaunchError as missing:
        error = printable(str(missing), _MOST_ERROR)
        write_out(f"{peer.title}: {error}\n")
    return [Variant(peer, drafts, version, error) for drafts in ("", *(peer.drafts if with_drafts and not peer.whole else ()))]


def _measure(plan: PeerPlan, variant: Variant, process: int, commands: dict[str, str]) -> None:
    """One process of an engine. What goes wrong is noted in the variant."""
    write_out(f"{variant.label}: process {process + 1} of {plan.processes}\n")
    try:
        memory = used_gpu_bytes() if plan.on_gpus else 0
        with started(plan, variant, commands) as (session, url, start_s):
            variant.start_s.append(start_s)
            for load in plan.loads:
                _ask(variant, load, url)
            used = used_gpu_bytes() - memory if plan.on_gpus else resident_bytes(session)
            variant.memory_bytes.append(used)
    except (KogError, OSError) as error:
        variant.error = printable(str(error), _MOST_ERROR)
        write_out(f"{variant.label}: {variant.error}\n")


def _ask(variant: Variant, load: PeerLoad, url: str) -> None:
    settings = ServeSettings(
        ServiceUrl.parse(url), load.backend, None, 1, float("inf"), load.at_once, 0, 0, 0.0, load.ignore_eos, _ANSWER_S
    )
    try:
        _, [first] = measured(settings, [load.first])
        if first.error:
            raise RequestFailed("warmup_failed", first.error)
        result, answers = measured(settings, load.prompts)
    except KogError as error:
        variant.failures[load.label] = printable(str(error), _MOST_ERROR)
        return
    if result["failed"]:
        variant.failures[load.label] = printable(next(filter(None, result["errors"])), _MOST_ERROR)
        return
    variant.results.setdefault(load.label, []).append(result)
    variant.answers.setdefault(load.label, answers)
    rate, first_ms = result["median_decode_tokens_per_s"] or 0.0, result["median_ttft_ms"]
    write_out(f"  {load.label}: {rate:.1f} tokens/s of one request, first token after {first_ms:.1f} ms\n")


@contextlib.contextmanager
def started(plan: PeerPlan, variant: Variant, commands: dict[str, str]) -> Iterator[tuple[EngineSession, str, float]]:
    """The engine, its URL, and after how many seconds it answered. Raises LaunchError with its last words if it does not."""
    model = plan.gguf if variant.peer.reads_gguf else plan.model
    if model is None:
        raise LaunchError(f"{variant.peer.title} reads GGUF files alone; give one with --gguf")
    port = free_port()
    command = variant.peer.command(
        str(model),
        port,
        context=plan.context,
        slots=plan.slots,
        devices=plan.devices,
        on_gpus=plan.on_gpus,
        drafts=variant.drafts,
    )
    commands[variant.label] = " ".join([Path(command[0]).name, *command[1:]])
    with engine_session() as session:
        session.variables |= _NO_NETWORK
        begin_s, url = time.monotonic(), f"http://127.0.0.1:{port}"
        engine = session.start_command(command, "peer")
        while not _answers(url):
            if (code := engine.poll()) is not None:
                raise LaunchError(f"it ended with code {code} before it answered; {_last_words(session)}")
            if time.monotonic() - begin_s > plan.start_s:
                raise LaunchError(f"no answer at its port after {plan.start_s:g} s; {_last_words(session)}")
            time.sleep(_LOOK_S)
        yield session, url, time.monotonic() - begin_s
        engine.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is killed
            engine.wait(_STOP_S)


def _answers(url: str) -> bool:
    """Whether an engine is ready: by /health where it has one, else by its list of models."""
    for path in ("/health", "/v1/models"):
        try:
            with urlopen(url + path, timeout=5) as response:
                return bool(response.status == 200)
        except HTTPError as error:
            if error.code != 404:
                return False
        except (URLError, OSError):
            return False
    return False


def _last_words(session: EngineSession) -> str:
    """The last line of its log that says something."""
    for stream in ("err", "out"):
        if last := last_line(session.output("peer", stream)):
            return f"its last line: {short(last, 200)}"
    return "it said nothing"


def free_port() -> int:
    """A port of this machine that nobody has; engines want one by number."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def used_gpu_bytes() -> int:
    """Memory in use on the GPUs that engines started from here see; 0 where there are none."""
    gpus = visible_gpus(read_inventory().gpus, os.environ).gpus
    return sum(gpu.memory_bytes - gpu.free_bytes for gpu in gpus)


def resident_bytes(session: EngineSession) -> int:
    """Memory of all processes of an engine; what several share counts once (PSS)."""
    total = 0
    for pid in session.pids():
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
            total += sum(int(part.split()[1]) for part in text.splitlines() if part.startswith("Pss:")) << 10
    return total


def tokenizer_of(model: Path) -> Tokenizer | None:
    """The model's, as we read it; None if we cannot."""
    try:
        return ModelFolder.from_folder(model, OWN).tokenizer
    except KogError:
        return None


def weights_of(model: Path, gguf: Path | None) -> tuple[Path, Path | None]:
    """What engines read, and what those read that know GGUF alone. Of a folder that has nothing else its GGUF file is both.

    Raises ConfigError for what is not there.
    """
    for path in filter(None, (model, gguf)):
        if not path.exists():
            raise ConfigError(f"there is no {path}")
    if model.suffix == ".gguf":
        return model.absolute(), (gguf or model).absolute()
    files = sorted(model.glob("*.gguf"))
    if len(files) == 1 and not any(model.glob("*.safetensors")):
        return files[0].absolute(), (gguf or files[0]).absolute()
    return model.absolute(), gguf and gguf.absolute()


def with_room(plan: PeerPlan) -> PeerPlan:
    """The plan without loads for which the model's context has no room; these are told. Raises ConfigError if none is left."""
    limit = ModelFolder.from_folder(plan.model, OWN).spec.max_context
    fitting = [load for load in plan.loads if load.context <= limit]
    for load in plan.loads:
        if load not in fitting:
            write_out(f"{load.label}: left out, it may take {load.context:,} tokens and the model has {limit:,}\n")
    if not fitting:
        raise ConfigError(f"the model's context of {limit:,} tokens has room for none of these loads")
    return replace(plan, loads=fitting)
