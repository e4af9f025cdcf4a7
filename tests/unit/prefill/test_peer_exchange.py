"""Sums between GPUs: allreduce.cu compiled by g++, a thread for each rank, plain memory in the place of the symmetric heap."""

from __future__ import annotations

import ctypes
import functools
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.collectives.mailbox import place
from kog_dist.errors import DeviceError
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.exchange import peer_exchange
from kog_dist.workers.prefill.exchange.lane_sums import OneRank, Rehearsal
from kog_dist.workers.prefill.exchange.peer_exchange import PeerExchange, mailboxes, summed_layers
from kog_dist.workers.prefill.exchange.sums_abi import sums_header
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled
from tests.unit.prefill.models import SMALL, VARIANTS, Rank, token_ids

SIZES = (8, 32)
EXACT = 12  # of one row tile and a half
PROMPT = 75
JOIN_S = 30.0
Libraries = Callable[[int], list[ctypes.CDLL]]


class AtOnce:
    """`Queues` of a device that does everything when it is queued."""

    def sending(self) -> Any:
        return nullcontext()

    def collecting(self) -> Any:
        return nullcontext()

    def collected(self) -> Callable[[], None]:
        return lambda: None


class World:
    """Ranks of one model. Each has its own copy of the kernels, since threads of a copy run one kernel at a time."""

    def __init__(self, libraries: Libraries, checkpoint: Checkpoint, num_ranks: int, limit_s: float = JOIN_S) -> None:
        spec = checkpoint.spec
        self.boxes = place(mailboxes(spec, max(SIZES), num_ranks), num_ranks)
        num_words = self.boxes[-1].first_word + self.boxes[-1].num_words
        self.heaps = [np.zeros(num_words, np.uint64) for _ in range(num_ranks)]
        self.exchanges, self.ranks = [], []
        for index in range(num_ranks):
            kernels = libraries(num_ranks)[index]

            def launch(name: str, num_ctas: int, num_threads: int, params: bytes, kernels: Any = kernels) -> None:
                getattr(kernels, f"launch_{name}")(ctypes.c_uint(num_ctas), ctypes.c_uint(num_threads), params)

            peers = np.zeros((), PEERS.dtype)
            peers["heap_ptr"][:num_ranks] = [heap.ctypes.data for heap in self.heaps]
            peers["rank"], peers["num_ranks"] = index, num_ranks
            heap = self.heaps[index].view(np.float32)
            exchange = PeerExchange(
                spec, max(SIZES), self.boxes, heap, peers.tobytes(), launch, AtOnce(), limit_s=limit_s, num_ctas=2
            )
            self.exchanges.append(exchange)
            lanes = spec.lanes_of_rank(index, num_ranks)
            self.ranks.append(Rank(checkpoint, lanes=lanes, dtype=np.float16, exchange=exchange, sizes=SIZES, exact_size=EXACT))

    def together(self, run: Callable[[Rank], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(run, self.ranks, timeout=JOIN_S))


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    """The kernels for a number of ranks, a copy for each."""

    @functools.cache
    def made(num_ranks: int) -> list[ctypes.CDLL]:
        library = compiled(
            tmp_path_factory.mktemp("sums"), "allreduce", sums_header(num_ranks), peer_exchange._KERNELS, "SumLaunch"
        )
        copies = [library.with_name(f"sums{index}.so") for index in range(num_ranks)]
        for copy in copies:
            shutil.copy(library, copy)
        return [ctypes.CDLL(str(copy)) for copy in copies]

    return made


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUM_THREADS", "WAIT_THREADS"):
        monkeypatch.setattr(peer_exchange, name, 4)  # threads are expensive here


def model(folder: Path, variant: str) -> Checkpoint:
    spec = ModelSpec(**{**SMALL, **VARIANTS[variant]})
    write_checkpoint(folder, spec, random_tensors(spec, 7), manifest=False)
    return open_checkpoint(folder)


@needs_compiler
@pytest.mark.parametrize(("variant", "num_ranks"), [("delayed", 4), ("all blocking", 2), ("no attention communication", 2)])
def test_any_number_of_ranks_has_the_bits_of_one(libraries: Libraries, tmp_path: Path, variant: str, num_ranks: int) -> None:
    checkpoint = model(tmp_path, variant)
    ids = token_ids(checkpoint.spec, PROMPT)
    alone = Rank(checkpoint, dtype=np.float16, sizes=SIZES, exact_size=EXACT)
    world = World(libraries, checkpoint, num_ranks)
    for end, start in ((40, 0), (PROMPT, 40), (60, 20), (EXACT - 1, 0)):
        alone.run(ids[:end], start)
        assert world.together(lambda rank, end=end, start=start: rank.run(ids[:end], start)) == [end] * num_ranks  # type: ignore[misc]
    for rank in world.ranks:
        heads = slice(rank.lanes[0] * rank.spec.lane_kv_heads, (rank.lanes[-1] + 1) * rank.spec.lane_kv_heads)
        for layer in range(rank.spec.num_layers):
            first = rank.layout.first_kept(layer, PROMPT)
            kept = [one.layout.load(one.cache, layer, first, 60) for one in (rank, alone)]
            for found, wanted in zip(*kept, strict=True):
                assert np.array_equal(found, wanted[:, heads])
        own = slice(None) if rank.spec.has_one_stream else slice(rank.lanes[0], rank.lanes[-1] + 1)
        assert np.array_equal(rank.buffers.last_streams, alone.buffers.last_streams[own])


@needs_compiler
def test_an_overflow_on_one_rank_is_that_of_all(libraries: Libraries, tmp_path: Path) -> None:
    checkpoint = model(tmp_path, "delayed")
    ids = token_ids(checkpoint.spec, PROMPT)
    world = World(libraries, checkpoint, 2)
    world.together(lambda rank: rank.run(ids[:20]))
    kept, matrix = [rank.cache.copy() for rank in world.ranks], world.ranks[1].matrices[-1].wqkv  # whose sums go nowhere
    np.multiply(matrix, 60000, out=matrix)
    assert world.together(lambda rank: rank.run(ids, 20)) == [20, 20]
    assert all(np.array_equal(rank.cache, before) for rank, before in zip(world.ranks, kept, strict=True))
    np.divide(matrix, 60000, out=matrix)
    assert world.together(lambda rank: rank.run(ids, 20)) == [PROMPT, PROMPT], "the next request is unharmed"


@needs_compiler
def test_a_peer_that_does_not_come_is_named(libraries: Libraries, tmp_path: Path) -> None:
    checkpoint = model(tmp_path, "delayed")
    world = World(libraries, checkpoint, 4, limit_s=0.05)
    rank, ids = world.ranks[2], token_ids(checkpoint.spec, PROMPT)
    with pytest.raises(DeviceError, match=r"rank 2, .*waited 0\.\d+ s for \d+ words? of rank [013] \(epoch \d+ wanted, 0 seen\)"):
        rank.run(ids)
    assert not rank.cache.any(), "what was computed with wrong sums is not stored"


@needs_compiler
@pytest.mark.parametrize("kernel", ["begin_sums", "send_parts", "add_parts"])
def test_a_stop_ends_a_wait(libraries: Libraries, tmp_path: Path, kernel: str) -> None:
    checkpoint = model(tmp_path, "delayed")
    world = World(libraries, checkpoint, 2)
    rank, exchange, ids = world.ranks[0], world.exchanges[0], token_ids(checkpoint.spec, PROMPT)
    launch, is_launched, reached = exchange._launch, threading.Event(), list[int]()

    def told(name: str, num_ctas: int, num_threads: int, params: bytes) -> None:
        if name == kernel:
            is_launched.set()
        launch(name, num_ctas, num_threads, params)

    exchange._launch = told
    thread = threading.Thread(target=lambda: reached.append(rank.run(ids, 0)), daemon=True)
    thread.start()
    assert is_launched.wait(JOIN_S)
    exchange.stop()  # while that kernel runs, or soon after; rank 1 never comes
    thread.join(JOIN_S)
    assert reached == [0]
    assert not rank.cache.any()


class Recorder(OneRank):
    """Which sums are published and asked for, in order."""

    is_alone = False

    def __init__(self) -> None:
        self.calls: list[tuple[str, Sublayer, int]] = []
        self.is_last = False

    def begin_last(self) -> None:
        self.is_last = True  # its sums have slots of their own

    def publish(self, sublayer: Sublayer, layer: int, own_sum: Array) -> None:
        if not self.is_last:
            self.calls.append(("publish", sublayer, layer))

    def total(self, sublayer: Sublayer, layer: int, own_sum: Array) -> Array:
        if not self.is_last:
            self.calls.append(("total", sublayer, layer))
        return own_sum


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_slot_is_written_before_it_was_read(tmp_path: Path, variant: str) -> None:
    """One rank goes ahead as far as its waits let it, the other one does one thing at a time."""
    checkpoint = model(tmp_path, variant)
    recorder, spec = Recorder(), checkpoint.spec
    rank = Rank(checkpoint, exchange=recorder, sizes=(8,))
    rank.run(token_ids(spec, 24))
    layers = {sublayer: summed_layers(spec, sublayer) for sublayer in Sublayer}
    published = [(sublayer, layer) for what, sublayer, layer in recorder.calls if what == "publish"]
    assert published == 3 * sorted(
        ((sublayer, layer) for sublayer in Sublayer for layer in layers[sublayer]), key=lambda place: place[::-1]
    )
    assert lost(recorder.calls, spec.delay + 1) == (0, 0)
    if variant == "no early communication":
        assert min(lost(recorder.calls, spec.delay - 1)) > 0, "the test would see it"


Sum = tuple[Sublayer, int]  # of a kind of chunks, and its epoch


class Ahead:
    """One rank's two queues: the layers' calls, and what adds up and awaits."""

    def __init__(self, calls: list[tuple[str, Sublayer, int]]) -> None:
        self.main, self.collecting = deque[tuple[str, Sum]](), deque[tuple[str, Sum]]()
        self.sent, self.added, self.arrived = set[Sum](), set[Sum](), set[Sum]()
        self.reads, self.place = Counter[Sum](), dict[Sum, int]()  # of a total that are still to come; its layer
        num_published, latest = dict.fromkeys(Sublayer, 0), dict[tuple[Sublayer, int], Sum]()
        for what, sublayer, layer in calls:
            if what == "publish":
                num_published[sublayer] += 1
                latest[sublayer, layer] = (sublayer, num_published[sublayer])
                self.place[latest[sublayer, layer]] = layer
            else:
                self.reads[latest[sublayer, layer]] += 1
            self.main.append((what, latest[sublayer, layer]))


def lost(calls: list[tuple[str, Sublayer, int]], num_slots: int) -> tuple[int, int]:
    """Parts of the fast rank, and totals, that are overwritten before the slow one has read them."""
    ranks = [Ahead(calls), Ahead(calls)]
    lost_parts, lost_totals = set[Sum](), set[Sum]()

    def call(rank: int) -> bool:
        own, peer = ranks[rank], ranks[1 - rank]
        if not own.main or (own.main[0][0] == "total" and own.main[0][1] not in own.arrived):
            return False
        what, one = own.main.popleft()
        if what == "total":
            own.reads[one] -= 1
            return True
        own.collecting += [("add", one), ("await", one)]
        sublayer, epoch = one
        lost_parts.update({(sublayer, epoch - num_slots)} & own.sent - peer.added)
        own.sent.add(one)
        return True

    def collect(rank: int) -> bool:
        own, peer = ranks[rank], ranks[1 - rank]
        if not own.collecting or own.collecting[0][1] not in (peer.sent if own.collecting[0][0] == "add" else peer.added):
            return False
        what, one = own.collecting.popleft()
        if what == "await":
            own.arrived.add(one)
            return True
        own.added.add(one)
        for reader in ranks:  # whoever still wants what this total is written over
            place = {other for other, layer in reader.place.items() if other[0] is one[0] and other[1] < one[1]
                     and layer % num_slots == reader.place[one] % num_slots}  # fmt: skip
            lost_totals.update(other for other in place if reader.reads[other] > 0)
        return True

    while call(0) or collect(0) or collect(1) or call(1):
        pass
    assert not any(rank.main or rank.collecting for rank in ranks), "nobody waits for ever"
    return len(lost_parts), len(lost_totals)


def test_a_rehearsal_needs_nobody() -> None:
    own, rehearsal = np.ones((2, 4), np.float32), Rehearsal()
    rehearsal.begin_chunk()
    rehearsal.publish(Sublayer.MLP, 0, own)
    assert rehearsal.total(Sublayer.MLP, 0, own) is own
    assert not rehearsal.is_alone
