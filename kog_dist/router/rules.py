"""Which waiting request goes to which replica. Pure: what is known goes in, decisions come out; docs/launchers.md says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

STICKY_WAIT_S: Final = 0.25  # how long a request waits for the replica that has its beginning while another is free
MAX_LOSSES: Final = 1  # replicas that may be lost with a request on them before it is given up


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that no replica has. `homes` are the replicas that have its beginning cached, as far as that is known."""

    request_id: str
    since_s: float
    homes: tuple[str, ...] = ()  # the best one first
    avoid: frozenset[str] = frozenset()  # replicas that have just refused it


@dataclass(frozen=True, slots=True)
class Seat:
    """What a replica can take now. `is_usable`: it serves, and only needs to finish what it has."""

    name: str
    is_usable: bool
    is_free: bool
    idle_since_s: float


@dataclass(frozen=True, slots=True)
class Assignment:
    """Requests and the replicas that get them; `look_again_s` is when waiting for a home ends, `math.inf` for never."""

    pairs: tuple[tuple[str, str], ...]
    look_again_s: float


def assign(waiting: Iterable[Waiting], seats: Sequence[Seat], now_s: float) -> Assignment:
    """Give free replicas to requests in the order of the requests, each to a home of its own if one is free.

    Homes that are busy are waited for at most STICKY_WAIT_S while others are free. Of several free replicas the one that has been
    idle longest is taken: the caches of the others are more likely to be asked for again.
    """
    free = {seat.name: seat for seat in seats if seat.is_free}
    usable = {seat.name for seat in seats if seat.is_usable}
    pairs = []
    look_again_s = math.inf
    for request in waiting:
        if not free:
            break
        homes = [name for name in request.homes if name in usable and name not in request.avoid]
        name = next((name for name in homes if name in free), None)
        if homes and name is None:
            give_up_s = request.since_s + STICKY_WAIT_S
            if now_s < give_up_s:
                look_again_s = min(look_again_s, give_up_s)
                continue
        if name is None:
            name = _longest_idle(free, request.avoid)
        if name is not None:
            del free[name]
            pairs.append((request.request_id, name))
    return Assignment(tuple(pairs), look_again_s)


def _longest_idle(free: Mapping[str, Seat], avoid: frozenset[str]) -> str | None:
    names = [name for name in free if name not in avoid]
    return min(names, key=lambda name: (free[name].idle_since_s, name), default=None)
