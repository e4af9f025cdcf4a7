"""The CPU communicator against planted memory: two ranks in one process, and words that a test writes one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kog_dist.collectives import words
from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cpu import CpuCommunicator
from kog_dist.collectives.heap import HeapHandle, SymmetricHeap
from kog_dist.errors import AbortedError, ConfigError, DeviceError, LaunchError, PeerLost
from kog_dist.runtime.abi import WaitOp
from kog_dist.runtime.control import ControlPage, EpochWaits
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline, WaitResult

LENGTH = 12
TIMEOUT_S = 0.01
Pair = tuple[CpuCommunicator, CpuCommunicator]


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(2, 16)
    yield page
    page.close()


@pytest.fixture
def pair(page: ControlPage) -> Iterator[Pair]:
    """Ranks 0 and 1, whose waits are short."""
    meeting = LocalRendezvous.create(2)

    def create(rank: int) -> CpuCommunicator:
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=page.aborted)
        boxes = [MailboxSpec("a", 2, LENGTH), MailboxSpec("b", 2, LENGTH)]
        comm = CpuCommunicator.create(
            boxes, rendezvous=rendezvous, control=page, deadline=Deadline.after(30), timeout_s=TIMEOUT_S, epoch_bits=8
        )
        rendezvous.close()
        return comm

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(create, range(2))
    yield first, second
    first.close()
    second.close()
    meeting.close()


def values_of(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(LENGTH).astype(np.float32)


def planted_row(comm: CpuCommunicator, mailbox: str, slot: int, source: int) -> words.Words:
    """The row of `source` in the rank's own memory."""
    placed = comm._boxes[mailbox].mailbox
    return comm._heap.peer_view(comm.rank, placed.row(slot, source) * words.WORD_BYTES, LENGTH)


def test_a_vector_counts_only_when_its_last_word_is_there(pair: Pair) -> None:
    comm = pair[0]
    row = planted_row(comm, "b", 1, 1)
    own, theirs = values_of(1), values_of(2)
    random = np.random.default_rng(3)
    for epoch in (1, 3, 5, 255, 256, 257):
        tag = epoch & 255
        packed = words.pack(theirs, tag)
        arrived = comm._arrival(comm._boxes["b"], 1, tag, LENGTH)
        order = random.permutation(LENGTH)
        for place in order:
            assert not arrived()
            row[place] = packed[place]
        assert arrived()
        assert comm.collect("b", 1, epoch, own).tobytes() == np.stack([own, theirs]).tobytes()
    del row


@pytest.mark.parametrize("place", [0, 5, LENGTH - 1])
def test_one_missing_word_is_reported(pair: Pair, page: ControlPage, place: int) -> None:
    comm = pair[0]
    row = planted_row(comm, "b", 0, 1)
    row[:] = words.pack(values_of(2), 7)
    row[place] = words.pack(values_of(2), 5)[place]
    with pytest.raises(DeviceError, match=r"mailbox 'b' slot 0 waited .* s for 1 word of rank 1 \(epoch 7 wanted, 5 seen\)"):
        comm.collect("b", 0, 7, values_of(1))
    ((rank, record),) = page.abort_requests()
    assert rank == 0
    assert record is not None
    assert (record.op, record.mailbox, record.slot, record.peer, record.num_missing) == (WaitOp.COLLECT, 1, 0, 1, 1)
    assert (record.epoch_wanted, record.epoch_seen, record.label) == (7, 5, "b")
    assert record.elapsed_ns >= TIMEOUT_S * 1e9
    del row


def test_what_was_not_there_at_the_first_look_is_counted(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    second.publish("a", 0, 1, values_of(2))
    first.delayed_reduce("a", 0, 1, values_of(1))
    assert first.waits == EpochWaits(0, 0), "it was there"

    def peer_comes(ready: Callable[[], bool], **_: object) -> WaitResult:
        second.publish("a", 1, 2, values_of(3))
        return WaitResult.OK if ready() else WaitResult.TIMEOUT

    monkeypatch.setattr("kog_dist.collectives.cpu.wait", peer_comes)
    first.all_reduce("a", 1, 2, values_of(1))
    assert first.waits.num_epochs == 1
    assert 0 < first.waits.waited_ns < 60e9
    monkeypatch.setattr("kog_dist.collectives.cpu.wait", lambda ready, **_: WaitResult.TIMEOUT)
    with pytest.raises(DeviceError):
        first.all_gather("a", 0, 3, values_of(1))
    assert first.waits.num_epochs == 1, "that one has its record"


def test_an_open_heap_keeps_a_descriptor_for_each_mapping_only() -> None:
    """That of `mmap` itself; a second one for each peer would bring many ranks to their limit."""
    meeting = LocalRendezvous.create(3)

    def create(rank: int) -> SymmetricHeap:
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=lambda: False)
        heap = SymmetricHeap.create(4096, rendezvous, Deadline.after(30), generation=1, fingerprint=bytes(32))
        rendezvous.close()
        return heap

    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(3) as pool:
        heaps = list(pool.map(create, range(3)))
    assert len(os.listdir("/proc/self/fd")) <= before + 3 * 3
    heaps[0].peer_view(2, 4088, 1)[0] = 7
    assert heaps[2].own_words()[511] == 7, "the last word of the heap"
    with pytest.raises(IndexError, match="1 words at byte 4096 are not inside the heap of 4096 bytes"):
        heaps[0].peer_view(2, 4096, 1)
    for heap in heaps:
        heap.close()
    assert len(os.listdir("/proc/self/fd")) == before
    meeting.close()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    """Whoever had pages taken away would die of SIGBUS."""
    fd = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(LaunchError, match="is not shared memory of this engine: 4096 bytes, seals 0"):
        Segment.from_fd(fd)
    os.close(fd)


def test_a_barrier_is_not_an_epoch(pair: Pair) -> None:
    with pytest.raises(DeviceError, match="a barrier"):
        pair[0].barrier()
    assert pair[0].waits == EpochWaits()


def test_nothing_is_published_after_a_timeout(pair: Pair) -> None:
    first, second = pair
    before = planted_row(second, "a", 0, 0).copy()
    with pytest.raises(DeviceError, match="a barrier"):
        first.barrier()
    for _ in range(2):
        with pytest.raises(AbortedError, match="a wait had run out of time"):
            first.publish("a", 0, 1, values_of(1))
    assert planted_row(second, "a", 0, 0).tolist() == before.tolist()


def test_a_collected_vector_does_not_change_any_more(pair: Pair) -> None:
    first, second = pair
    second.publish("a", 0, 1, values_of(1))
    found = first.collect("a", 0, 1, values_of(0))
    kept = found.tobytes()
    second.publish("a", 0, 2, values_of(2))
    first.collect("a", 0, 2, values_of(0))
    assert found.tobytes() == kept


def test_mailboxes_and_slots_do_not_touch_each_other(pair: Pair) -> None:
    first, second = pair
    for number, (mailbox, slot) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)]):
        second.publish(mailbox, slot, 9, values_of(number))
    for number, (mailbox, slot) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)]):
        assert first.collect(mailbox, slot, 9, values_of(99))[1].tobytes() == values_of(number).tobytes()


def test_handles_that_are_not_handles_are_refused() -> None:
    handle = HeapHandle(1, 2, 4096, 1, 5, 6, b"f" * 32)
    assert HeapHandle.unpack(handle.pack(), 3) == handle
    for raw in (b"", b"x" * len(handle.pack()), handle.pack()[:-1]):
        with pytest.raises(ConfigError, match="rank 3 sent"):
            HeapHandle.unpack(raw, 3)


class ScriptedRendezvous:
    """Rank 0 of two; the peer's handle is what the test says, made from the own one."""

    rank, world_size = 0, 2

    def __init__(self, **changes: int | bytes) -> None:
        self.changes = changes

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        peer = replace(HeapHandle.unpack(payload, 0), **self.changes)  # type: ignore[arg-type]
        return [payload, peer.pack()]

    def barrier(self, deadline: Deadline) -> None:
        pass


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"size_bytes": 8192}, ConfigError, "rank 1 laid its heap out differently"),
        ({"generation": 2}, ConfigError, "generation 2"),
        ({"fingerprint": b"g" * 32}, ConfigError, "same plan"),
        ({"fd": 1 << 20}, PeerLost, "rank 1 .* was gone"),
        ({"pid": 2**22 + 1}, PeerLost, "rank 1 .* was gone"),
        ({"inode": 1}, PeerLost, "rank 1 .* was gone"),
    ],
)
def test_wrong_heaps_are_refused_and_nothing_leaks(changes: dict[str, int | bytes], error: type[Exception], message: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        SymmetricHeap.create(4096, ScriptedRendezvous(**changes), Deadline.after(1), generation=1, fingerprint=b"f" * 32)
    assert len(os.listdir("/proc/self/fd")) == before


def test_views_stay_inside_the_heap() -> None:
    heap = SymmetricHeap(0, [Segment.create("own", 4096)])
    assert heap.peer_view(0, 4088, 1).tolist() == [0]
    for offset, num_words in ((4088, 2), (-8, 1), (4, 1), (4096, 1)):
        with pytest.raises(IndexError, match="not inside the heap"):
            heap.peer_view(0, offset, num_words)
    heap.close()


def test_a_message_may_be_several_vectors(page: ControlPage) -> None:
    """Shorter ones behind longer ones, and the other way round; what is left of longer ones is not read."""
    meeting = LocalRendezvous.create(2)

    def work(rank: int) -> list[bytes]:
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=page.aborted)
        boxes = [MailboxSpec("a", 1, 3, most=5), MailboxSpec("b", 1, 2)]
        deadline = Deadline.after(30)
        comm = CpuCommunicator.create(boxes, rendezvous=rendezvous, control=page, deadline=deadline, timeout_s=30)
        found = []
        for epoch, count in enumerate((5, 1, 3, 2, 5), start=1):
            values = np.arange(3 * count, dtype=np.float32) + 100 * rank + 1000 * epoch
            found.append(comm.all_gather("a", 0, epoch, values).tobytes())
            comm.barrier()  # one slot
        for wrong in (2, 4, 18, 0):
            with pytest.raises(ValueError, match="carries contiguous float32 vectors, 5 at most, of 3 values"):
                comm.publish("a", 0, 9, np.zeros(wrong, np.float32))
        with pytest.raises(ValueError, match="carries contiguous float32 vectors of 2 values"):
            comm.publish("b", 0, 9, np.zeros(4, np.float32))
        comm.close()
        rendezvous.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(work, range(2))
    meeting.close()
    assert first == second
    wanted = [
        np.stack([np.arange(3 * count) + 100 * rank + 1000 * epoch for rank in range(2)])
        for epoch, count in enumerate((5, 1, 3, 2, 5), start=1)
    ]
    assert first == [rows.astype(np.float32).tobytes() for rows in wanted]
