"""The GPU heap's protocol with memory that is played by Python: handles, addresses, order of opening and closing, refusals."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.collectives.cuda_heap import CudaHeap, CudaHeapHandle
from kog_dist.collectives.device_memory import Place
from kog_dist.collectives.mailbox import place
from kog_dist.errors import AbortedError, ConfigError, KogError, LaunchError, RendezvousTimeout
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline

HOST = bytes(range(16))
PLAN = bytes(32)
GRANULE = 2 << 20


class Machine:
    """The GPUs of all ranks: memory by physical address, and what was done with it, in order."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.log: list[tuple[int, str, int]] = []
        self.lock = threading.Lock()
        self.exported: dict[bytes, int] = {}
        self.broken: set[tuple[int, int]] = set()  # (writer, owner): what is written does not arrive


class PlayedMemory:
    """Rank r's GPU sees its own memory at (r + 1) << 40, and what it opens at another address."""

    def __init__(self, machine: Machine, rank: int, place: Place) -> None:
        self.machine, self.rank, self.place = machine, rank, place
        self.mapped: dict[int, int] = {}  # start as seen here -> physical start
        self.peers: list[int] = []

    def note(self, what: str, ptr: int) -> None:
        with self.machine.lock:
            self.machine.log.append((self.rank, what, ptr))

    def allocate(self, size_bytes: int) -> int:
        assert size_bytes % GRANULE == 0
        start = (self.rank + 1) << 40
        self.mapped[start] = start
        self.note("allocate", start)
        return start

    def export(self, ptr: int) -> bytes:
        handle = self.rank.to_bytes(64, "little")
        self.machine.exported[handle] = ptr
        self.note("export", ptr)
        return handle

    def open(self, handle: bytes) -> int:
        physical = self.machine.exported[handle]
        seen = physical + (1 << 50) + (self.rank << 55)
        self.mapped[seen] = physical
        self.note("open", physical)
        return seen

    def close(self, ptr: int) -> None:
        self.note("close", self.mapped.pop(ptr))

    def enable_peer(self, ordinal: int) -> None:
        self.peers.append(ordinal)

    def physical(self, ptr: int) -> int:
        for start, physical in self.mapped.items():
            if start <= ptr < start + GRANULE:
                return physical + ptr - start
        assert self.peers, f"rank {self.rank} addresses memory that it has not mapped"
        return ptr

    def write_word(self, ptr: int, value: int) -> None:
        at = self.physical(ptr)
        if (self.rank, (at >> 40) - 1) not in self.machine.broken:
            self.machine.words[at] = value

    def read_word(self, ptr: int) -> int:
        return self.machine.words.get(self.physical(ptr), 0)

    def synchronize(self) -> None:
        self.note("synchronize", 0)

    def free(self, ptr: int) -> None:
        self.note("free", self.mapped.pop(ptr))


def places(world_size: int, *, one_process: bool = False) -> list[Place]:
    """A GPU each; in processes of their own every rank calls its GPU number 0, as behind CUDA_VISIBLE_DEVICES."""
    return [
        Place(HOST, 100 if one_process else 100 + rank, 7, f"0000:{rank:02x}:00.0", rank if one_process else 0)
        for rank in range(world_size)
    ]  # fmt: skip


def meet(
    machine: Machine, own_places: list[Place], body: Callable[[CudaHeap], Any], *, shares_gpus: bool = False, **changes: Any
) -> list[Any]:
    """Make the heap on every rank, in threads, and call `body` with it; results or errors by rank. `changes`: of rank 0."""
    world_size = len(own_places)
    meeting = LocalRendezvous.create(world_size)
    results: list[Any] = [None] * world_size
    stopped = threading.Event()

    def run(rank: int) -> None:
        rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=stopped.is_set)
        options = {"generation": 3, "fingerprint": PLAN, "shares_gpus": shares_gpus, **(changes if rank == 0 else {})}
        memory = PlayedMemory(machine, rank, own_places[rank])
        try:
            heap = CudaHeap.create(5000, rendezvous, Deadline.after(20.0), memory, **options)
            results[rank] = body(heap)
        except KogError as error:
            results[rank] = error
            stopped.set()  # as the supervisor would
        finally:
            rendezvous.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    meeting.close()
    return results


def test_handle_survives_packing_and_refuses_others() -> None:
    handle = CudaHeapHandle(places(1)[0], 1 << 63, GRANULE, 4, PLAN, bytes(range(64)))
    assert CudaHeapHandle.unpack(handle.pack(), 0) == handle
    for raw in (b"", handle.pack()[:-1], b"X" + handle.pack()[1:]):
        with pytest.raises(ConfigError, match="rank 5 sent"):
            CudaHeapHandle.unpack(raw, 5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_addresses_every_heap(world_size: int) -> None:
    machine = Machine()

    def table(heap: CudaHeap) -> list[int]:
        peers = heap.device_handle()
        assert peers.nbytes == PEERS.size_bytes
        assert (int(peers["rank"]), int(peers["num_ranks"])) == (heap.rank, world_size)
        starts = [int(start) for start in peers["heap_ptr"]]
        assert starts[world_size:] == [0] * (8 - world_size)
        assert [heap.peer_ptr(peer, 4992) for peer in range(world_size)] == [start + 4992 for start in starts[:world_size]]
        for offset in (-8, 4, 5000):
            with pytest.raises(IndexError):
                heap.peer_ptr(0, offset)
        heap.close()
        heap.close()
        return starts

    tables = meet(machine, places(world_size), table)
    for rank, starts in enumerate(tables):
        assert starts[rank] == (rank + 1) << 40, "the own heap is addressed as allocated"
        assert len(set(starts[:world_size])) == world_size


def test_memory_is_zeroed_before_it_is_published_and_freed_after_all_have_unmapped_it() -> None:
    machine = Machine()
    assert meet(machine, places(4), lambda heap: heap.close()) == [None] * 4
    for rank in range(4):
        own = (rank + 1) << 40
        mine = [what for who, what, _ in machine.log if who == rank]
        assert mine == ["allocate", "export", *["open"] * 3, "synchronize", *["close"] * 3, "free"]
        freed = machine.log.index((rank, "free", own))
        closed = [machine.log.index((peer, "close", own)) for peer in range(4) if peer != rank]
        assert max(closed) < freed, "a peer still had the memory mapped"


def test_gpus_of_one_process_need_no_handles() -> None:
    machine = Machine()
    own_places = places(2, one_process=True)
    tables = meet(machine, own_places, lambda heap: [int(start) for start in heap.device_handle()["heap_ptr"][:2]])
    assert tables == [[1 << 40, 2 << 40]] * 2
    assert not any(what == "open" for _, what, _ in machine.log)


def test_memory_stays_when_a_peer_may_have_it_mapped() -> None:
    machine = Machine()

    def body(heap: CudaHeap) -> str:
        if heap.rank == 1:
            raise AbortedError("died")  # never closes
        heap.close()
        return "closed"

    assert meet(machine, places(2), body)[0] == "closed"
    assert not any(what == "free" for _, what, _ in machine.log)
    assert (0, "close", 2 << 40) in machine.log


def errors(results: list[Any], kind: type[KogError]) -> list[str]:
    found = [str(error) for error in results if isinstance(error, kind)]
    assert found, results
    assert all(isinstance(error, KogError) for error in results), "no rank goes on"
    return found


def test_different_layouts_are_refused() -> None:
    for changes in ({"fingerprint": b"\1" * 32}, {"generation": 4}):
        texts = errors(meet(Machine(), places(2), lambda heap: None, **changes), ConfigError)
        assert "all ranks must run the same plan" in texts[0]


def test_two_ranks_on_one_gpu_are_refused() -> None:
    own_places = places(3)
    own_places[2] = replace(own_places[2], bus_id=own_places[1].bus_id)
    texts = errors(meet(Machine(), own_places, lambda heap: None), ConfigError)
    assert all("ranks 1 and 2 were both given GPU 0000:01:00.0" in text for text in texts)
    assert meet(Machine(), own_places, lambda heap: heap.world_size, shares_gpus=True) == [3, 3, 3]


def test_ranks_of_other_machines_are_refused() -> None:
    own_places = places(2)
    own_places[1] = replace(own_places[1], host=bytes(16))
    assert "different machines" in errors(meet(Machine(), own_places, lambda heap: None), ConfigError)[0]


def test_a_mapping_that_leads_nowhere_is_found_at_start_up() -> None:
    machine = Machine()
    machine.broken.add((1, 0))
    results = meet(machine, places(3), lambda heap: None)
    assert "what rank 1 (GPU 0000:01:00.0) wrote into the memory of rank 0 (GPU 0000:00:00.0) did not arrive" in str(results[0])
    assert isinstance(results[0], LaunchError)
    assert all(isinstance(result, KogError) for result in results)


def test_a_rank_that_never_comes_is_named() -> None:
    meeting = LocalRendezvous.create(2)
    rendezvous = LocalRendezvous.from_fd(os.dup(meeting.fd), 0, aborted=lambda: False)
    with pytest.raises(RendezvousTimeout) as caught:
        CudaHeap.create(
            64, rendezvous, Deadline.after(0.05), PlayedMemory(Machine(), 0, places(2)[0]), generation=1, fingerprint=PLAN
        )  # fmt: skip
    assert caught.value.missing == (1,)
    rendezvous.close()
    meeting.close()


def test_rows_of_a_mailbox_suit_16_byte_stores() -> None:
    for box in place([MailboxSpec("a", 3, 33), MailboxSpec("b", 2, 1), MailboxSpec("c", 1, 3072)], 4):
        rows = np.array([box.row(slot, source) for slot in range(box.spec.num_slots) for source in range(4)])
        assert (rows % 2 == 0).all()
        assert box.row_words >= box.spec.length + box.spec.length % 2, "an odd last value has room for its neighbour"
