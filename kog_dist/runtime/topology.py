"""Who a rank is, and how ranks meet: `RankInfo` and the `Rendezvous`, which every launcher provides to every worker alike.

`LocalRendezvous` is the one for ranks of one host: a memfd that the supervisor creates and every rank inherits. `MpiRendezvous`,
for the processes that MPI has started, is in mpi_rendezvous.py.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from kog_dist.errors import AbortedError, ConfigError, LaunchError, RendezvousTimeout
from kog_dist.records import dataclass
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.process_arguments import JsonArguments
from kog_dist.runtime.wait import Deadline, WaitResult, wait


@dataclass(frozen=True, slots=True)
class RankInfo(JsonArguments):
    """What a launcher tells a worker about itself. `control_fd` and `rendezvous_fd` are inherited descriptors, -1 for none."""

    reader: ClassVar[str] = "rank"

    rank: int
    world_size: int
    local_rank: int
    instance: str
    generation: int = 1
    control_fd: int = -1
    rendezvous_fd: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not one of {self.world_size} ranks, expected 0 to {self.world_size - 1}")
        if self.local_rank < 0 or self.generation < 1:
            raise ConfigError(f"local rank {self.local_rank} or generation {self.generation} of rank {self.rank} is not possible")


class Rendezvous(Protocol):
    """How the ranks of one start meet before they share memory. Collective: every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """Every rank's payload, in the order of ranks.

        Raises RendezvousTimeout naming the ranks that did not come, AbortedError when the engine is being stopped.
        """

    def barrier(self, deadline: Deadline) -> None:
        """Return when every rank has come. Raises like `all_gather_bytes`."""


_HEADER_BYTES = 128  # magic, world size, slot size; then the slots
_SLOT_HEADER_BYTES = 32  # round, length, checksum
_MAGIC = int.from_bytes(b"KOGMEET\0", "little")
_NUM_SLOTS = 2


class LocalRendezvous:
    """Ranks of one host meet in a memfd: each rank writes its slot of the round and reads everyone's.

    Two slots per rank, used in turn, are enough: a rank that starts round n + 2 has finished round n + 1, so every rank has
    written n + 1, which it does only after it has read all of round n. A slot is accepted when its round, length and checksum
    agree, so the order in which the writer's stores arrive does not matter.
    """

    def __init__(
        self, segment: Segment, rank: int, *, aborted: Callable[[], bool], on_poll: Callable[[], None] | None = None
    ) -> None:
        self._segment = segment
        self._words = segment.words()
        if self._words[0] != _MAGIC:
            raise LaunchError(f"descriptor {segment.fd} is not a rendezvous of this engine")
        self.rank = rank
        self.world_size = int(self._words[1])
        self._slot_bytes = int(self._words[2])
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} cannot join a rendezvous of {self.world_size} ranks")
        self._aborted = aborted
        self._on_poll = on_poll
        self._round = 0

    @staticmethod
    def create(world_size: int, *, max_payload_bytes: int = 16384) -> Segment:
        """The shared memory of a rendezvous. The supervisor keeps it and passes its `fd` to the ranks."""
        slot_bytes = _SLOT_HEADER_BYTES + -(-max_payload_bytes // 8) * 8
        segment = Segment.create("kog-rendezvous", _HEADER_BYTES + world_size * _NUM_SLOTS * slot_bytes)
        words = segment.words()
        words[1], words[2] = world_size, slot_bytes
        words[0] = _MAGIC
        words.release()
        return segment

    @classmethod
    def from_fd(
        cls, fd: int, rank: int, *, aborted: Callable[[], bool], on_poll: Callable[[], None] | None = None
    ) -> LocalRendezvous:
        """Join through an inherited descriptor, which is owned from now on. `aborted` ends waits, `on_poll` may beat."""
        return cls(Segment.from_fd(fd), rank, aborted=aborted, on_poll=on_poll)

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous`. ValueError when the payload does not fit into a slot."""
        limit = self._slot_bytes - _SLOT_HEADER_BYTES
        if len(payload) > limit:
            raise ValueError(f"a rendezvous carries at most {limit} bytes per rank, got {len(payload)}")
        self._round += 1
        if not self._aborted():  # a rank that leaves must not look like one that has come
            self._write(payload)
        arrived: dict[int, bytes] = {}

        def complete() -> bool:
            for rank in range(self.world_size):
                found = self._read(rank) if rank not in arrived else None
                if found is not None:
                    arrived[rank] = found
            return len(arrived) == self.world_size

        started = time.monotonic()
        result = wait(complete, aborted=self._aborted, deadline=deadline, on_poll=self._on_poll, yields=200)
        if result is WaitResult.ABORT:
            raise AbortedError(f"rank {self.rank} left rendezvous {self._round} because the engine is being stopped")
        if result is WaitResult.TIMEOUT:
            missing = [rank for rank in range(self.world_size) if rank not in arrived]
            raise RendezvousTimeout(missing, timeout_text(self.rank, self._round, missing, time.monotonic() - started))
        return [arrived[rank] for rank in range(self.world_size)]

    def barrier(self, deadline: Deadline) -> None:
        """See `Rendezvous`."""
        self.all_gather_bytes(b"", deadline)

    def _slot(self, rank: int) -> int:
        return _HEADER_BYTES + (rank * _NUM_SLOTS + self._round % _NUM_SLOTS) * self._slot_bytes

    def _write(self, payload: bytes) -> None:
        start = self._slot(self.rank)
        body = start + _SLOT_HEADER_BYTES
        self._segment.buffer[body : body + len(payload)] = payload
        self._words[start // 8 + 1] = len(payload)
        self._words[start // 8 + 2] = zlib.crc32(payload, self._round)
        self._words[start // 8] = self._round

    def _read(self, rank: int) -> bytes | None:
        start = self._slot(rank)
        length, check = self._words[start // 8 + 1], self._words[start // 8 + 2]
        if self._words[start // 8] != self._round or length > self._slot_bytes - _SLOT_HEADER_BYTES:
            return None
        body = start + _SLOT_HEADER_BYTES
        payload = self._segment.buffer[body : body + length]
        return payload if zlib.crc32(payload, self._round) == check else None

    def close(self) -> None:
        """Unmap; the other ranks are not told."""
        self._words.release()
        self._segment.close()


def timeout_text(rank: int, round_number: int, missing: Sequence[int], waited_s: float) -> str:
    """What a RendezvousTimeout says, whatever the rendezvous."""
    names = ", ".join(str(peer) for peer in missing)
    return (
        f"rank {rank} waited {waited_s:.1f} s in rendezvous {round_number} and rank {names} did not come; "
        f"look at its last words, or raise the start-up timeout"
    )
