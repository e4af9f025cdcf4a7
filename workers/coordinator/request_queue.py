"""Requests that wait for the ranks: bounded, and fair between connections."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import zip_longest
from typing import Final

from kog_dist.errors import RequestError
from kog_dist.rpc.messages import ErrorCode
from kog_dist.workers.coordinator.streams import RequestStream

FIRST_RETRY_S: Final = 1.0  # while no request has ended yet, from which to estimate
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 600.0
_REMEMBERED = 16  # requests of which the mean duration is the estimate for the next


class RequestQueue:
    """Connections take turns: each has one request run, then it stands behind all others. Within one, first come first served.

    A connection's turn lasts until its request has ended, and one that comes later stands at the end: it waits for at most one
    request of each other connection, and whoever comes after it waits for it.
    """

    def __init__(self, limit: int, client_limit: int) -> None:
        """`limit` requests may wait, `client_limit` of one connection."""
        self.limit, self.client_limit = limit, client_limit
        self._lines: dict[bytes, deque[RequestStream]] = {}  # by connection, in the order of their turns
        self._serving: bytes | None = None  # whose turn it is; it goes to the end
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[RequestStream]:
        """In the order in which they will run if nothing else comes."""
        if not self._lines:
            return iter(())
        rounds = zip_longest(*(self._lines[peer] for peer in self._turns()))
        return (stream for turns in rounds for stream in turns if stream is not None)

    def check_room(self, peer: bytes, *, num_others: int = 0, num_own_others: int = 0) -> None:
        """Raises RequestError `queue_full`, with an estimate of when there is room, if one more of `peer` may not wait.

        `num_others` requests wait elsewhere, to get here, `num_own_others` of them of `peer`.
        """
        num_all, num_own = len(self) + num_others, len(self._lines.get(peer, ())) + num_own_others
        if num_all >= self.limit:
            raise self._full(f"{num_all} requests are waiting already, the most this engine takes (--queue-limit)", 1)
        if num_own >= self.client_limit:
            reason = f"{num_own} requests of this client are waiting already, the most it may have (--client-queue-limit)"
            raise self._full(reason, len(self._lines))

    def _full(self, reason: str, num_turns: int) -> RequestError:
        """`num_turns`: requests that end before there is room."""
        mean_s = sum(self._durations_s) / len(self._durations_s) if self._durations_s else FIRST_RETRY_S
        retry_after_s = round(min(max(mean_s * num_turns, LEAST_RETRY_S), MOST_RETRY_S), 3)
        return RequestError(ErrorCode.QUEUE_FULL, f"{reason}; try again in about {retry_after_s:g} s", retry_after_s)

    def add(self, stream: RequestStream) -> None:
        """Let it wait; see `check_room`."""
        self._lines.setdefault(stream.peer, deque()).append(stream)

    def pop(self) -> RequestStream:
        """The request that runs next; its connection's turn begins."""
        assert self._serving is None, "one request runs at a time"
        peer = next(iter(self._lines))
        stream = self._lines[peer].popleft()
        self._serving = peer
        self._drop_if_empty(peer)
        return stream

    def turn_over(self, duration_s: float) -> None:
        """The request that `pop` gave has ended, after so long."""
        assert self._serving is not None, "a turn ends once"
        if self._serving in self._lines:
            self._lines[self._serving] = self._lines.pop(self._serving)
        self._serving = None
        self._durations_s.append(duration_s)

    def remove(self, stream: RequestStream) -> bool:
        """Take out a request that nobody waits for any more; whether it was there."""
        line = self._lines.get(stream.peer)
        if line is None or stream not in line:
            return False
        line.remove(stream)
        self._drop_if_empty(stream.peer)
        return True

    def _drop_if_empty(self, peer: bytes) -> None:
        if not self._lines[peer]:
            del self._lines[peer]

    def _turns(self) -> list[bytes]:
        others = [peer for peer in self._lines if peer != self._serving]
        return [*others, self._serving] if self._serving is not None and self._serving in self._lines else others
