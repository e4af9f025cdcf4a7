"""The rendezvous of ranks that share nothing but Ray: the engine's host actor is where they meet.

Rank actors use it before there is any memory or socket to share, to learn of each other's GPUs. A round takes a round trip of
1 ms; it is never on the token path.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kog_dist.errors import AbortedError, ConfigError, RendezvousTimeout
from kog_dist.wait import Deadline

# Round, rank, payload and seconds left (None: no limit) of one `Meeting.gather`; blocks for the answer.
Ask = Callable[[int, int, bytes, float | None], list[bytes | None] | None]


@dataclass(slots=True)
class _Round:
    payloads: list[bytes | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    num_readers: int = 0


class Meeting:
    """The host actor's side, for one event loop."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds: dict[int, _Round] = {}
        self._stopped = False

    async def gather(self, round_number: int, rank: int, payload: bytes, timeout_s: float | None) -> list[bytes | None] | None:
        """Leave `rank`'s payload and return everyone's; None in place of ranks that did not come, None at all once stopped."""
        if not 0 <= rank < self._world_size:
            raise ConfigError(f"rank {rank} cannot join a rendezvous of {self._world_size} ranks")
        if self._stopped:
            return None
        meeting = self._rounds.setdefault(round_number, _Round([None] * self._world_size))
        meeting.payloads[rank] = payload
        if None not in meeting.payloads:
            meeting.complete.set()
        try:
            await asyncio.wait_for(meeting.complete.wait(), timeout_s)
        except TimeoutError:
            return list(meeting.payloads)
        meeting.num_readers += 1
        if meeting.num_readers == self._world_size:
            self._rounds.pop(round_number, None)
        return None if self._stopped else list(meeting.payloads)

    def stop(self) -> None:
        """The engine is being stopped: end every wait, now and later."""
        self._stopped = True
        for meeting in self._rounds.values():
            meeting.complete.set()


class RayRendezvous:
    """A rank's side; see `Rendezvous`."""

    def __init__(self, rank: int, world_size: int, ask: Ask) -> None:
        self.rank = rank
        self.world_size = world_size
        self._ask = ask
        self._round = 0

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous`."""
        self._round += 1
        limit_s = deadline.remaining_s()
        found = self._ask(self._round, self.rank, payload, None if math.isinf(limit_s) else limit_s)
        if found is None:
            raise AbortedError(f"rank {self.rank} left rendezvous {self._round} because the engine is being stopped")
        missing = [peer for peer, theirs in enumerate(found) if theirs is None]
        if missing:
            names = ", ".join(map(str, missing))
            raise RendezvousTimeout(
                missing,
                f"rank {self.rank} waited {limit_s:.1f} s in rendezvous {self._round} and rank {names} did not come; "
                "look at the log of its Ray actor, or raise the start-up timeout",
            )
        return [theirs for theirs in found if theirs is not None]

    def barrier(self, deadline: Deadline) -> None:
        """See `Rendezvous`."""
        self.all_gather_bytes(b"", deadline)
