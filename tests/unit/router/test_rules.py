"""Which request goes to which replica, as a function of what is known."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kog_dist.router.rules import STICKY_WAIT_S, Seat, Waiting, assign

NOW_S = 100.0


def seat(name: str, *, free: bool = True, usable: bool = True, idle_since_s: float = 0.0) -> Seat:
    return Seat(name, usable, free and usable, idle_since_s)


def test_requests_go_in_order_to_the_replica_that_idles_longest() -> None:
    seats = [seat("r0", idle_since_s=3.0), seat("r1", idle_since_s=1.0), seat("r2", free=False), seat("r3", idle_since_s=2.0)]
    waiting = [Waiting(f"q{i}", NOW_S) for i in range(4)]
    decided = assign(waiting, seats, NOW_S)
    assert decided.pairs == (("q0", "r1"), ("q1", "r3"), ("q2", "r0"))


def test_home_is_preferred_to_one_that_idles_longer() -> None:
    seats = [seat("r0", idle_since_s=1.0), seat("r1", idle_since_s=50.0)]
    assert assign([Waiting("q", NOW_S, ("r1",))], seats, NOW_S).pairs == (("q", "r1"),)


def test_the_best_free_home_is_taken() -> None:
    seats = [seat("r0", idle_since_s=1.0), seat("r1", free=False), seat("r2", idle_since_s=9.0), seat("r3")]
    assert assign([Waiting("q", NOW_S, ("r1", "r2", "r0"))], seats, NOW_S).pairs == (("q", "r2"),)


def test_busy_home_is_waited_for_and_others_pass() -> None:
    seats = [seat("r0"), seat("r1", free=False)]
    waiting = [Waiting("sticky", NOW_S, ("r1",)), Waiting("other", NOW_S)]
    decided = assign(waiting, seats, NOW_S)
    assert decided.pairs == (("other", "r0"),)
    assert decided.look_again_s == NOW_S + STICKY_WAIT_S


def test_patience_ends() -> None:
    seats = [seat("r0"), seat("r1", free=False)]
    waiting = [Waiting("sticky", NOW_S, ("r1",))]
    assert assign(waiting, seats, NOW_S + STICKY_WAIT_S - 1e-6).pairs == ()
    decided = assign(waiting, seats, NOW_S + STICKY_WAIT_S)
    assert decided == decided.__class__((("sticky", "r0"),), math.inf)


def test_home_that_does_not_serve_is_not_waited_for() -> None:
    seats = [seat("r0"), seat("r1", usable=False)]
    assert assign([Waiting("q", NOW_S, ("r1",))], seats, NOW_S).pairs == (("q", "r0"),)
    assert assign([Waiting("q", NOW_S, ("gone",))], seats, NOW_S).pairs == (("q", "r0"),)


def test_replica_that_has_just_refused_is_avoided_even_as_home() -> None:
    seats = [seat("r0", idle_since_s=9.0), seat("r1", idle_since_s=1.0)]
    refused = Waiting("q", NOW_S, ("r1",), frozenset({"r1"}))
    assert assign([refused], seats, NOW_S).pairs == (("q", "r0"),)
    assert assign([refused], [seat("r1")], NOW_S).pairs == ()


@given(
    homes=st.lists(st.lists(st.sampled_from(["r0", "r1", "r2", "r3", "gone"]), unique=True, max_size=3).map(tuple), max_size=12),
    ages_s=st.lists(st.floats(0, 1), min_size=12, max_size=12),
    kinds=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=4),
)
def test_nobody_is_served_twice_and_no_replica_idles_while_somebody_could_have_it(
    homes: list[tuple[str, ...]], ages_s: list[float], kinds: list[tuple[bool, bool]]
) -> None:
    seats = [seat(f"r{i}", free=free, usable=usable) for i, (free, usable) in enumerate(kinds)]
    waiting = [Waiting(f"q{i}", NOW_S - age_s, home) for i, (home, age_s) in enumerate(zip(homes, ages_s, strict=False))]
    decided = assign(waiting, seats, NOW_S)
    requests, replicas = [pair[0] for pair in decided.pairs], [pair[1] for pair in decided.pairs]
    free = {s.name for s in seats if s.is_free}
    assert len(set(requests)) == len(requests)
    assert len(set(replicas)) == len(replicas)
    assert set(replicas) <= free
    if free - set(replicas):
        left = [request for request in waiting if request.request_id not in requests]
        busy = {s.name for s in seats if s.is_usable} - free | set(replicas)
        assert all(busy & set(request.homes) and request.since_s + STICKY_WAIT_S > NOW_S for request in left)
