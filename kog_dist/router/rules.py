"""Which waiting request goes to which replica. Pure: what is known goes in, decisions come out; docs/replicas.md says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Final

from kog_dist.records import dataclass

STICKY_WAIT_S: Final = 2.0  # most that a request waits for the replica that has its beginning while another is free
BLOCK_S: Final = 0.0016  # to compute a block of a prompt, until there is a measurement: 64 tokens at 40,000 a second
WORTH_SHARE: Final = 0.5  # of what a free replica would have to compute; saving less is no reason to prefer another free one
WORTH_BLOCKS: Final = 8  # but so many always are: 2 KiB of text, 512 token ids, about 10 ms of prefill
MAX_LOSSES: Final = 1  # replicas that may be lost with a request on them before it is given up


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that no replica has. `known`: blocks of its prompt that replicas have cached, as far as that is known."""

    request_id: str
    passed_s: float | None = None  # when a free replica was first left to others for its sake
    known: Mapping[str, int] = field(default_factory=dict)  # by replica
    num_blocks: int = 1  # of its prompt
    avoid: frozenset[str] = frozenset()  # replicas that have just refused it

    def known_by(self, name: str) -> int:
        """Blocks that a replica has."""
        return self.known.get(name, 0)

    def prefill_s(self, name: str, block_s: float) -> float:
        """Seconds that a replica takes to compute the rest of it, as far as its blocks are counted."""
        return (self.num_blocks - self.known_by(name)) * block_s

    def is_worth(self, num_known: int, most_known: int) -> bool:
        """Whether a free replica with `num_known` blocks of it should be left for another free one with `most_known`."""
        num_saved, num_missing = most_known - num_known, self.num_blocks - num_known
        return num_saved > 0 and num_saved >= min(WORTH_SHARE * num_missing, WORTH_BLOCKS)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a replica can take now. `is_usable`: it serves, and only needs to finish what it has."""

    name: str
    is_usable: bool
    num_free: int  # requests that it would begin at once,
    idle_since_s: float
    busy_until_s: float = 0.0  # at the earliest; before that it computes the prompt of what it runs
    num_running: int = 0  # besides these

    @property
    def is_free(self) -> bool:
        """Whether it would begin a request at once."""
        return self.num_free > 0

    def with_one_more(self, busy_until_s: float) -> Seat:
        """Behind a request that it has been given."""
        return replace(self, num_free=self.num_free - 1, num_running=self.num_running + 1, busy_until_s=busy_until_s)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Requests and the replicas that get them; `look_again_s` is when waiting for a busy one ends, `math.inf` for never."""

    pairs: tuple[tuple[str, str], ...]
    look_again_s: float
    passed: tuple[str, ...] = ()  # requests that wait for a busy replica although another one is free


def assign(waiting: Iterable[Waiting], seats: Sequence[Seat], now_s: float, block_s: float = BLOCK_S) -> Assignment:
    """Give free replicas to requests in their order: to each the one that has most of it, or hardly less and has fewest others.

    Of those that have equally many others it is the one that idles longest.

    A busy one that has more than any free one is waited for as long as it takes to compute what it has more, at `block_s` for
    each block, and at most STICKY_WAIT_S: so waiting in vain costs no more than going elsewhere at once. Nor is
    one waited for that computes a prompt for longer than that.
    """
    free = {seat.name: seat for seat in seats if seat.is_free}
    busy_until_s = {seat.name: seat.busy_until_s for seat in seats if seat.is_usable and not seat.is_free}
    pairs, passed = [], []
    look_again_s = math.inf
    for request in waiting:
        if not free:
            break
        allowed = [seat for name, seat in free.items() if name not in request.avoid]
        most_known = max((request.known_by(seat.name) for seat in allowed), default=0)
        give_up_s = _give_up_s(request, busy_until_s, most_known, now_s, block_s)
        if now_s < give_up_s:
            look_again_s = min(look_again_s, give_up_s)
            passed.append(request.request_id)
        elif allowed:
            name = _best_free(request, allowed, most_known)
            seat = free[name].with_one_more(now_s + request.prefill_s(name, block_s))
            pairs.append((request.request_id, name))
            if seat.is_free:
                free[name] = seat
            else:
                del free[name]
                busy_until_s[name] = seat.busy_until_s
    return Assignment(tuple(pairs), look_again_s, tuple(passed))


def _give_up_s(request: Waiting, busy_until_s: Mapping[str, float], most_known: int, now_s: float, block_s: float) -> float:
    """Until when to wait for busy replicas that have more of it than `most_known` and may be free by then; `now_s` for not."""
    since_s = now_s if request.passed_s is None else request.passed_s
    limits_s = {
        name: since_s + min(STICKY_WAIT_S, (request.known_by(name) - most_known) * block_s)
        for name in busy_until_s.keys() - request.avoid
    }
    return max((limit_s for name, limit_s in limits_s.items() if busy_until_s[name] < limit_s), default=now_s)


def _best_free(request: Waiting, seats: Iterable[Seat], most_known: int) -> str:
    """Of those that are not worth leaving for the one with most, the one that runs fewest, and has been idle longest.

    The caches of the others are more likely to be asked for again.
    """
    good = (seat for seat in seats if not request.is_worth(request.known_by(seat.name), most_known))
    return min(good, key=lambda seat: (seat.num_running, seat.idle_since_s, seat.name)).name
