"""The symmetric heap of CPU ranks: as many zeroed bytes on every rank, and each rank's heap mapped by all others.

A heap is a memfd without a name. Its handle, the twin of a CUDA IPC handle, is a few bytes that name the exporting process and
its descriptor; a peer of the same user opens it through /proc. The mappings outlive the exporter: a rank that dies takes nothing
away from those that still read or write its memory.
"""

from __future__ import annotations

import os
import struct
from typing import Final

import numpy as np

from kog_dist.collectives.words import WORD_BYTES, Words
from kog_dist.errors import ConfigError, LaunchError, PeerLost
from kog_dist.records import dataclass
from kog_dist.runtime.memfd import Segment, round_up
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline

_MAGIC: Final = b"KOGHEAP1"
_LAYOUT: Final = struct.Struct("<8sIIQQQQ32s")


@dataclass(frozen=True, slots=True)
class HeapHandle:
    """How a peer finds a heap. `device` and `inode` tell whether the descriptor is still the same memory."""

    pid: int
    fd: int
    size_bytes: int
    generation: int
    device: int
    inode: int
    fingerprint: bytes

    def pack(self) -> bytes:
        """The handle for the rendezvous."""
        numbers = (self.pid, self.fd, self.size_bytes, self.generation, self.device, self.inode)
        return _LAYOUT.pack(_MAGIC, *numbers, self.fingerprint)

    @classmethod
    def unpack(cls, raw: bytes, rank: int) -> HeapHandle:
        """The inverse of `pack`; ConfigError when `rank` sent something else."""
        if len(raw) != _LAYOUT.size or raw[:8] != _MAGIC:
            raise ConfigError(f"rank {rank} sent {len(raw)} bytes that are not a heap's handle; start all ranks from one version")
        return cls(*_LAYOUT.unpack(raw)[1:])


class SymmetricHeap:
    """The own heap and the views of the peers' heaps. Offsets are in bytes from the start of a heap, multiples of 8."""

    def __init__(self, rank: int, segments: list[Segment]) -> None:
        self.rank = rank
        self.size_bytes = segments[rank].size_bytes
        self._segments = segments

    @classmethod
    def create(
        cls, size_bytes: int, rendezvous: Rendezvous, deadline: Deadline, *, generation: int, fingerprint: bytes
    ) -> SymmetricHeap:
        """Allocate, export, map every peer. Collective: every rank calls it with the same size, generation and fingerprint.

        Raises RendezvousTimeout naming the ranks that never came, ConfigError when a rank brings another heap than this one,
        PeerLost when a rank died on the way, LaunchError when the memory is not to be had.
        """
        rank = rendezvous.rank
        own = Segment.create(f"kog-heap-{rank}", size_bytes)
        segments: dict[int, Segment] = {rank: own}
        try:
            status = os.fstat(own.fd)
            handle = HeapHandle(os.getpid(), own.fd, own.size_bytes, generation, status.st_dev, status.st_ino, fingerprint)
            packed = rendezvous.all_gather_bytes(handle.pack(), deadline)
            for peer, raw in enumerate(packed):
                if peer != rank:
                    segments[peer] = _open_peer(peer, HeapHandle.unpack(raw, peer), handle)
            rendezvous.barrier(deadline)  # everyone has opened everything: the descriptors have done their work
        except BaseException:
            for segment in segments.values():
                segment.close()
            raise
        for segment in segments.values():
            segment.close_fd()
        return cls(rank, [segments[peer] for peer in range(rendezvous.world_size)])

    def peer_view(self, rank: int, offset: int, num_words: int) -> Words:
        """Words of a rank's heap, the own one included. Drop every view before `close`."""
        if offset < 0 or offset % WORD_BYTES or offset + num_words * WORD_BYTES > self.size_bytes:
            raise IndexError(f"{num_words} words at byte {offset} are not inside the heap of {self.size_bytes} bytes")
        return self._segments[rank].array(np.uint64, num_words, offset)

    def own_words(self) -> memoryview:
        """The own heap for reading single words; release it before `close`."""
        return self._segments[self.rank].words()

    def close(self) -> None:
        """Unmap the peers' heaps, then the own one."""
        for peer, segment in enumerate(self._segments):
            if peer != self.rank:
                segment.close()
        self._segments[self.rank].close()


def _open_peer(peer: int, handle: HeapHandle, own: HeapHandle) -> Segment:
    theirs = (handle.size_bytes, handle.generation, handle.fingerprint)
    if theirs != (own.size_bytes, own.generation, own.fingerprint):
        raise ConfigError(
            f"rank {peer} laid its heap out differently ({handle.size_bytes} bytes, generation {handle.generation}; here "
            f"{own.size_bytes} bytes, generation {own.generation}): all ranks must run the same plan and version"
        )
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise LaunchError(f"cannot open the heap of rank {peer} at {path}: all ranks must run as one user") from error
    except OSError as error:
        raise PeerLost(peer, f"rank {peer} (process {handle.pid}) was gone before its heap could be opened") from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != (handle.device, handle.inode):
        os.close(fd)
        raise PeerLost(peer, f"rank {peer} (process {handle.pid}) was gone before its heap could be opened")
    return Segment.from_fd(fd)


def heap_bytes(num_words: int) -> int:
    """Size of a heap that has room for so many words."""
    return round_up(max(1, num_words) * WORD_BYTES)
