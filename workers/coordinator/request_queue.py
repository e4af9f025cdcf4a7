"""Requests that wait for the ranks: bounded, and fair between connections."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final

from kog_dist.errors import RequestError
from kog_dist.rpc.messages import ErrorCode
from kog_dist.workers.coordinator.streams import RequestStream

FIRST_RETRY_S: Final = 1.0  # while no request has ended yet, from which to estimate
LEAST_RETRY_S, MOST_RETRY_S = 0.05, 600.0
_REMEMBERED = 16  # requests of which the mean duration is the estimate for the next


class RequestQueue:
    """Connections take turns: the next request is of the one of which fewest run, and of these of the one that has waited longest
    since a request of it ended. Within one, first come first served.

    A connection's turn lasts until its request has ended, and one that comes later stands at the end: where one request runs at a
    time, it waits for at most one request of each other connection, and whoever comes after it waits for it.
    """

    def __init__(self, limit: int, client_limit: int) -> None:
        """`limit` requests may wait, `client_limit` of one connection."""
        self.limit, self.client_limit = limit, client_limit
        self._lines: dict[bytes, deque[RequestStream]] = {}  # by connection, in the order of their turns
        self._served: Counter[bytes] = Counter()  # connections of the requests that run
        self._durations_s: deque[float] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[RequestStream]:
        """In the order in which they will run if nothing else comes."""
        lines, served, found = {peer: deque(line) for peer, line in self._lines.items()}, Counter(self._served), []
        while lines:
            peer = _next_turn(lines, served)
            found.append(lines[peer].popleft())
            served[peer] += 1
            if not lines[peer]:
                del lines[peer]
        return iter(found)

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
        mean_s /= max(1, self._served.total())  # so many end meanwhile
        retry_after_s = round(min(max(mean_s * num_turns, LEAST_RETRY_S), MOST_RETRY_S), 3)
        return RequestError(ErrorCode.QUEUE_FULL, f"{reason}; try again in about {retry_after_s:g} s", retry_after_s)

    def add(self, stream: RequestStream) -> None:
        """Let it wait; see `check_room`."""
        self._lines.setdefault(stream.peer, deque()).append(stream)

    def pop(self) -> RequestStream:
        """The request that runs next; its connection's turn begins."""
        stream = next(iter(self))
        self.take(stream)
        return stream

    def take(self, stream: RequestStream) -> None:
        """One that waits runs next, whether its turn has come or not; its connection's turn begins."""
        self._lines[stream.peer].remove(stream)
        self._served[stream.peer] += 1
        self._drop_if_empty(stream.peer)

    def turn_over(self, peer: bytes, duration_s: float) -> None:
        """A request that ran has ended, after so long."""
        assert self._served[peer], "a turn ends once"
        self._served[peer] -= 1
        if not self._served[peer]:
            del self._served[peer]
        if peer in self._lines:
            self._lines[peer] = self._lines.pop(peer)
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


def _next_turn(lines: Mapping[bytes, object], served: Mapping[bytes, int]) -> bytes:
    """The connection whose turn is next; `lines` are in the order in which their last requests ended."""
    return min(lines, key=lambda peer: served.get(peer, 0))
