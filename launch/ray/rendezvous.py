"""The rendezvous of ranks that share nothing but Ray: the engine's host actor is where they meet.

Rank actors use it before there is any memory or socket to share, to learn of each other's GPUs. A round takes a round trip of
1 ms; it is never on the token path.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import field

from kog_dist.errors import AbortedError, ConfigError, RendezvousTimeout
from kog_dist.records import dataclass
from kog_dist.runtime.wait import Deadline

_ASK_S = 0.25  # a question may be repeated; `aborted` is looked at in between
# Round, rank, payload and seconds of one `RayMeeting.gather`; blocks for the answer.
Ask = Callable[[int, int, bytes, float], list[bytes | None] | None]


@dataclass(slots=True)
class _Round:
    payloads: list[bytes | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    num_readers: int = 0


class RayMeeting:
    """The host actor's side, for one event loop."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._rounds: dict[int, _Round] = {}
        self._stopped = False

    async def gather(self, round_number: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes | None] | None:
        """Leave `rank`'s payload and return everyone's; None in place of ranks that did not come, None at all once stopped.

        A rank that got no complete answer may ask again.
        """
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

    def __init__(self, rank: int, world_size: int, ask: Ask, *, aborted: Callable[[], bool] | None = None) -> None:
        """`aborted` ends waits, besides the host's own `RayMeeting.stop`."""
        self._aborted = aborted
        self.rank = rank
        self.world_size = world_size
        self._ask = ask
        self._round = 0

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous`."""
        self._round += 1
        started_s = time.monotonic()
        while True:
            found = self._ask(self._round, self.rank, payload, min(_ASK_S, deadline.remaining_s()))
            if found is None or (self._aborted is not None and self._aborted()):
                raise AbortedError(f"rank {self.rank} left rendezvous {self._round} because the engine is being stopped")
            missing = [peer for peer, theirs in enumerate(found) if theirs is None]
            if not missing:
                return [theirs for theirs in found if theirs is not None]
            if deadline.expired():
                names = ", ".join(map(str, missing))
                raise RendezvousTimeout(
                    missing,
                    f"rank {self.rank} waited {time.monotonic() - started_s:.1f} s in rendezvous {self._round} and rank {names} "
                    "did not come; look at the log of its Ray actor, or raise the start-up timeout",
                )

    def barrier(self, deadline: Deadline) -> None:
        """See `Rendezvous`."""
        self.all_gather_bytes(b"", deadline)
