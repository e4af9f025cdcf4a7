"""The symmetric heap of GPU ranks: as many zeroed bytes on every GPU, each rank's heap addressable by all others.

Between processes a heap travels as a CUDA IPC handle, between the GPUs of one process as an address. The order is what makes it
safe: zero, then publish the handle, then open the peers' heaps, then write a word into each of them, meet, and look whether
the peers' words have come. Backwards: stop using, unmap the peers' heaps, meet, and only then free the own one; memory that a
peer may still have mapped is left to the end of the process instead.

A rank that dies takes nothing from the others: on the machines where this was measured its memory stays readable and writable
for those that have mapped it, until they unmap it (docs/kccl.md).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.cuda_abi import MAX_RANKS, PEERS
from kog_dist.collectives.device_memory import DeviceMemory, Place
from kog_dist.collectives.words import WORD_BYTES
from kog_dist.errors import ConfigError, KogError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.abi import LINE_BYTES
from kog_dist.runtime.memfd import round_up
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline

IPC_HANDLE_BYTES: Final = 64
_MAGIC: Final = b"KOGCUDA1"
_LAYOUT: Final = struct.Struct("<8s16sQQ16siIQQ32s64s")
_GRANULE: Final = 2 << 20  # the driver exports whole blocks of 2 MiB: a heap shares none with other memory
_CLOSE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class CudaHeapHandle:
    """How a peer finds a heap. `address` is for ranks of the same process, `ipc` for all others."""

    place: Place
    address: int
    size_bytes: int
    generation: int
    fingerprint: bytes
    ipc: bytes

    def pack(self) -> bytes:
        """The handle for the rendezvous."""
        place = self.place
        return _LAYOUT.pack(
            _MAGIC, place.host, place.pid, place.started, place.bus_id.encode(), place.ordinal, self.generation,
            self.address, self.size_bytes, self.fingerprint, self.ipc,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes, rank: int) -> CudaHeapHandle:
        """The inverse of `pack`; ConfigError when `rank` sent something else."""
        if len(raw) != _LAYOUT.size or raw[:8] != _MAGIC:
            raise ConfigError(
                f"rank {rank} sent {len(raw)} bytes that are not a GPU heap's handle; start all ranks from one version and "
                f"on one kind of device"
            )
        _, host, pid, started, bus_id, ordinal, generation, address, size_bytes, fingerprint, ipc = _LAYOUT.unpack(raw)
        place = Place(host, pid, started, bus_id.rstrip(b"\0").decode(errors="replace"), ordinal)
        return cls(place, address, size_bytes, generation, fingerprint, ipc)


class CudaHeap:
    """The own heap and the peers' heaps as this rank's GPU addresses them. Offsets are in bytes, multiples of 8."""

    def __init__(
        self, memory: DeviceMemory, rendezvous: Rendezvous, size_bytes: int, starts: Sequence[int], mapped: set[int]
    ) -> None:
        self.rank = rendezvous.rank
        self.world_size = rendezvous.world_size
        self.size_bytes = size_bytes
        self._memory, self._rendezvous = memory, rendezvous
        self._starts = list(starts)
        self._mapped = mapped  # ranks whose heaps were opened through IPC
        self._closed = False

    @classmethod
    def create(
        cls,
        size_bytes: int,
        rendezvous: Rendezvous,
        deadline: Deadline,
        memory: DeviceMemory,
        *,
        generation: int,
        fingerprint: bytes,
        shares_gpus: bool = False,
    ) -> CudaHeap:
        """Allocate, export, open and try every peer. Collective, with the same size, generation and fingerprint (32 bytes).

        `shares_gpus`: two ranks may have one GPU, where their kernels take turns. For tests of more ranks than there are GPUs.

        Raises RendezvousTimeout naming the ranks that never came, ConfigError when ranks do not fit together (other layout, other
        machine, one GPU for two ranks), LaunchError when memory cannot be had or a peer's cannot be reached.
        """
        rank, world_size = rendezvous.rank, rendezvous.world_size
        if world_size > MAX_RANKS:
            raise ConfigError(f"{world_size} ranks cannot share GPU memory: at most {MAX_RANKS} GPUs of one machine")
        # Behind the objects: a line for each rank, in which it shows that it can write here.
        total_bytes = round_up(round_up(size_bytes, LINE_BYTES) + LINE_BYTES * world_size, _GRANULE)
        address = memory.allocate(total_bytes)
        starts, mapped = {rank: address}, set[int]()
        try:
            ipc = memory.export(address) if world_size > 1 else bytes(IPC_HANDLE_BYTES)
            own = CudaHeapHandle(memory.place, address, total_bytes, generation, fingerprint, ipc)
            raw = rendezvous.all_gather_bytes(own.pack(), deadline)
            handles = [CudaHeapHandle.unpack(packed, peer) for peer, packed in enumerate(raw)]
            _check(handles, rank, shares_gpus=shares_gpus)
            for peer in _others(rank, world_size):
                handle = handles[peer]
                if handle.place.process == own.place.process:
                    memory.enable_peer(handle.place.ordinal)
                    starts[peer] = handle.address
                else:
                    starts[peer] = memory.open(handle.ipc)
                    mapped.add(peer)
            heap = cls(memory, rendezvous, size_bytes, [starts[peer] for peer in range(world_size)], mapped)
            heap._try_peers(deadline, handles, generation)
        except BaseException:
            # Peers may have opened this heap by now, so it stays until the process ends; what was opened is closed.
            for peer in mapped:
                with suppress(KogError):
                    memory.close(starts[peer])
            raise
        return heap

    def peer_ptr(self, rank: int, offset: int) -> int:
        """Address of a place in a rank's heap, the own one included, for kernels of this rank's GPU."""
        if offset < 0 or offset % WORD_BYTES or offset >= self.size_bytes:
            raise IndexError(f"byte {offset} is not a word of the heap of {self.size_bytes} bytes")
        return self._starts[rank] + offset

    def device_handle(self) -> NDArray[np.void]:
        """The heap as kernels take it: a `KogPeers`, by value."""
        peers = np.zeros((), PEERS.dtype)
        peers["heap_ptr"][: self.world_size] = self._starts
        peers["rank"], peers["num_ranks"] = self.rank, self.world_size
        return peers

    def close(self) -> None:
        """Unmap the peers' heaps, meet, free the own one. Collective; after an abort, when nobody comes, it does not free.

        Twice is harmless.
        """
        if self._closed:
            return
        self._closed = True
        self._memory.synchronize()
        for peer in sorted(self._mapped):
            self._memory.close(self._starts[peer])
        try:
            self._rendezvous.barrier(Deadline.after(_CLOSE_S))
        except KogError:
            return  # a peer may still write here: the memory goes when this process does
        self._memory.free(self._starts[self.rank])

    def _try_peers(self, deadline: Deadline, handles: Sequence[CudaHeapHandle], generation: int) -> None:
        """Touch every mapping before a kernel does, and see that it leads where it should."""
        place = round_up(self.size_bytes, LINE_BYTES)
        for peer in _others(self.rank, self.world_size):
            self._memory.write_word(self._starts[peer] + place + LINE_BYTES * self.rank, _greeting(generation, self.rank, peer))
        self._rendezvous.barrier(deadline)
        for peer in _others(self.rank, self.world_size):
            found = self._memory.read_word(self._starts[self.rank] + place + LINE_BYTES * peer)
            if found != _greeting(generation, peer, self.rank):
                there, here = handles[peer].place.bus_id, handles[self.rank].place.bus_id
                raise LaunchError(
                    f"what rank {peer} (GPU {there}) wrote into the memory of rank {self.rank} (GPU {here}) did not arrive: "
                    f"these GPUs cannot reach each other; see kog-doctor, and nvidia-smi topo -p2p rw"
                )
        self._rendezvous.barrier(deadline)  # nobody goes on before all have looked


def _others(rank: int, world_size: int) -> list[int]:
    """The peers of a rank; every rank begins with another one."""
    return [(rank + step) % world_size for step in range(1, world_size)]


def _greeting(generation: int, writer: int, reader: int) -> int:
    return generation << 32 | (writer + 1) << 16 | (reader + 1)


def _check(handles: Sequence[CudaHeapHandle], rank: int, *, shares_gpus: bool) -> None:
    own = handles[rank]
    for peer, handle in enumerate(handles):
        if (handle.size_bytes, handle.generation, handle.fingerprint) != (own.size_bytes, own.generation, own.fingerprint):
            raise ConfigError(
                f"rank {peer} laid its GPU heap out differently ({handle.size_bytes} bytes, generation {handle.generation}; "
                f"rank {rank} {own.size_bytes} bytes, generation {own.generation}): all ranks must run the same plan, kernel and "
                f"version"
            )
        if handle.place.host != own.place.host:
            raise ConfigError(f"ranks {rank} and {peer} are on different machines: GPUs share memory only within one")
    users: dict[str, int] = {}
    for peer, handle in enumerate(handles):
        first = users.setdefault(handle.place.bus_id, peer)
        if first != peer and not shares_gpus:
            raise ConfigError(
                f"ranks {first} and {peer} were both given GPU {handle.place.bus_id}: every rank needs a GPU of its own"
            )
