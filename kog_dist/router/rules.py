"""Which waiting request goes to which replica. Pure: what is known goes in, decisions come out; docs/replicas.md says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

STICKY_WAIT_S: Final = 2.0  # most that a request waits for the replica that has its beginning while another is free
BLOCK_S: Final = 0.0016  # to compute a block of a prompt, until there is a measurement: 64 tokens at 40,000 a second
LONG_SHARE: Final = 0.5  # of a prompt's blocks; what is less is no reason to prefer a replica
LONG_BLOCKS: Final = 128  # but so many always are: 32 KiB of text, 8,192 token ids
MAX_LOSSES: Final = 1  # replicas that may be lost with a request on them before it is given up


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that no replica has. `known`: blocks of its prompt that replicas have cached, as far as that is known."""

    request_id: str
    passed_s: float | None = None  # when a free replica was first left to others for its sake
    known: Mapping[str, int] = field(default_factory=dict)  # by replica
    num_blocks: int = 1  # of its prompt
    avoid: frozenset[str] = frozenset()  # replicas that have just refused it

    def known_by(self, name: str | None) -> int:
        """Blocks that a replica has."""
        return 0 if name is None else self.known.get(name, 0)

    def is_long(self, num_blocks: int) -> bool:
        """Whether so many blocks of it are worth preferring a certain replica."""
        return num_blocks > 0 and num_blocks >= min(LONG_SHARE * self.num_blocks, LONG_BLOCKS)


@dataclass(frozen=True, slots=True)
class Seat:
    """What a replica can take now. `is_usable`: it serves, and only needs to finish what it has."""

    name: str
    is_usable: bool
    is_free: bool
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """Requests and the replicas that get them; `look_again_s` is when waiting for a busy one ends, `math.inf` for never."""

    pairs: tuple[tuple[str, str], ...]
    look_again_s: float
    passed: tuple[str, ...] = ()  # requests that wait for a busy replica although another one is free


def assign(waiting: Iterable[Waiting], seats: Sequence[Seat], now_s: float, block_s: float = BLOCK_S) -> Assignment:
    """Give free replicas to requests in their order: to each the free one that has most of it, if that is a long beginning.

    A busy one that has more is waited for as long as it takes to compute what it has more, at `block_s` for each block, and at
    most STICKY_WAIT_S: so waiting in vain costs no more than going elsewhere at once. Of free replicas that have nothing long, or
    equally much, the one that has been idle longest is taken: the caches of the others are more likely to be asked for again.
    """
    free = {seat.name: seat for seat in seats if seat.is_free}
    usable = {seat.name for seat in seats if seat.is_usable}
    pairs, passed = [], []
    look_again_s = math.inf
    for request in waiting:
        if not free:
            break
        name = _best_free(request, free)
        busy = usable - free.keys() - request.avoid
        num_more = max(map(request.known_by, busy), default=0) - request.known_by(name)
        since_s = now_s if request.passed_s is None else request.passed_s
        give_up_s = since_s + min(STICKY_WAIT_S, num_more * block_s)
        if now_s < give_up_s:
            look_again_s = min(look_again_s, give_up_s)
            passed.append(request.request_id)
        elif name is not None:
            del free[name]
            pairs.append((request.request_id, name))
    return Assignment(tuple(pairs), look_again_s, tuple(passed))


def _best_free(request: Waiting, free: Mapping[str, Seat]) -> str | None:
    def rank(name: str) -> tuple[int, float, str]:
        num_blocks = request.known_by(name)
        return -num_blocks if request.is_long(num_blocks) else 0, free[name].idle_since_s, name

    return min((name for name in free if name not in request.avoid), key=rank, default=None)
