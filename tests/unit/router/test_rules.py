"""Which request goes to which replica, as a function of what is known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.router.rules import STICKY_WAIT_S, Assignment, Seat, Waiting, assign

NOW_S = 100.0


def seat(name: str, *, free: bool = True, usable: bool = True, idle_since_s: float = 0.0) -> Seat:
    return Seat(name, usable, free and usable, idle_since_s)


def test_requests_go_in_order_to_the_replica_that_idles_longest() -> None:
    seats = [seat("r0", idle_since_s=3.0), seat("r1", idle_since_s=1.0), seat("r2", free=False), seat("r3", idle_since_s=2.0)]
    waiting = [Waiting(f"q{i}") for i in range(4)]
    decided = assign(waiting, seats, NOW_S)
    assert decided.pairs == (("q0", "r1"), ("q1", "r3"), ("q2", "r0"))


def test_replicas_with_places_get_requests_in_turn_until_they_are_full() -> None:
    seats = [replace(seat("r0"), num_free=3), replace(seat("r1", idle_since_s=1.0), num_free=1, num_running=1)]
    decided = assign([Waiting(f"q{i}") for i in range(5)], seats, NOW_S)
    assert decided.pairs == (("q0", "r0"), ("q1", "r0"), ("q2", "r1"), ("q3", "r0")), "to who runs fewest, or idles longest"
    known = [Waiting(f"q{i}", None, {"r0": 8}, 9) for i in range(4)]
    decided = assign(known, seats, NOW_S)
    assert decided.pairs == (("q0", "r0"), ("q1", "r0"), ("q2", "r0")), "who has most has it while there is a place"
    assert decided.passed == ("q3",), "then it is waited for"


def asking(known: dict[str, int], num_blocks: int = 4, *, avoid: frozenset[str] = frozenset()) -> Waiting:
    return Waiting("q", None, known, num_blocks, avoid)


def test_the_free_replica_that_has_most_is_preferred_to_one_that_idles_longer() -> None:
    seats = [seat("r0", idle_since_s=1.0), seat("r1", idle_since_s=50.0), seat("r2", idle_since_s=60.0)]
    assert assign([asking({"r1": 3, "r2": 4})], seats, NOW_S).pairs == (("q", "r2"),)
    assert assign([asking({"r1": 3, "r2": 3})], seats, NOW_S).pairs == (("q", "r1"),), "of equals the one that idles longest"


@pytest.mark.parametrize(
    ("num_known", "num_blocks", "is_worth"),
    [
        (0, 1, False), (1, 2, True), (1, 3, False), (2, 4, True), (7, 14, True), (7, 15, False), (7, 1000, False),
        (8, 1000, True), (46, 100, True),
    ],
)  # fmt: skip
def test_a_beginning_is_worth_its_replica_if_it_is_half_of_the_prompt_or_8_blocks(
    num_known: int, num_blocks: int, is_worth: bool
) -> None:
    seats = [seat("r0", idle_since_s=1.0), seat("r1", idle_since_s=50.0)]
    assert assign([asking({"r1": num_known}, num_blocks)], seats, NOW_S).pairs == (("q", "r1" if is_worth else "r0"),)


@pytest.mark.parametrize(
    ("num_more", "num_blocks", "is_worth"),
    [(0, 340, False), (1, 340, False), (7, 340, False), (8, 340, True), (3, 318, True), (3, 319, False)],
)
def test_what_all_have_of_a_prompt_is_not_counted(num_more: int, num_blocks: int, is_worth: bool) -> None:
    """Both replicas have the same 312 blocks; more of the prompt is worth one of them by what the other would have to compute."""
    seats = [seat("r0", idle_since_s=1.0), seat("r1", idle_since_s=50.0)]
    request = asking({"r0": 312, "r1": 312 + num_more}, num_blocks)
    assert assign([request], seats, NOW_S).pairs == (("q", "r1" if is_worth else "r0"),)


def test_of_replicas_that_have_hardly_less_than_most_the_one_that_idles_longest_is_taken() -> None:
    seats = [seat(f"r{i}", idle_since_s=float(i)) for i in range(4)]
    request = asking({"r1": 93, "r2": 94, "r3": 100}, 1000)
    assert assign([request], seats, NOW_S).pairs == (("q", "r1"),)
    assert assign([replace(request, num_blocks=103)], seats, NOW_S).pairs == (("q", "r3"),), "r1 would compute 10, not 3"
    assert assign([replace(request, avoid=frozenset({"r3", "r1"}))], seats, NOW_S).pairs == (("q", "r2"),)


def test_prompts_that_share_a_short_beginning_are_spread() -> None:
    """Each replica is asked in turn, though all prompts have 4 of their 12 blocks in common."""
    idle_since_s = {"r0": 0.0, "r1": 0.0, "r2": 0.0}
    known: dict[str, int] = {}
    taken = []
    for number in range(1, 7):
        seats = [seat(name, idle_since_s=since_s) for name, since_s in idle_since_s.items()]
        ((_, name),) = assign([asking(known, 12)], seats, NOW_S).pairs
        idle_since_s[name], known[name] = float(number), 4
        taken.append(name)
    assert taken == ["r0", "r1", "r2"] * 2


def test_a_busy_replica_is_waited_for_and_others_pass() -> None:
    seats = [seat("r0"), seat("r1", free=False)]
    decided = assign([asking({"r1": 4}), Waiting("other")], seats, NOW_S, block_s=0.25)
    assert decided == Assignment((("other", "r0"),), NOW_S + 1.0, ("q",))


@pytest.mark.parametrize(
    ("known", "block_s", "patience_s"),
    [
        ({"r1": 4}, 0.25, 1.0), ({"r1": 4, "r0": 3}, 0.25, 0.25), ({"r1": 4, "r0": 4}, 0.25, 0.0),
        ({"r1": 3, "r0": 4}, 0.25, 0.0), ({"r1": 100}, 0.25, STICKY_WAIT_S), ({"r2": 4}, 0.25, 0.0),
        ({"r1": 10, "r0": 7, "r3": 8}, 0.25, 0.5),
    ],
)  # fmt: skip
def test_patience_is_the_time_to_compute_what_the_busy_one_has_more(
    known: dict[str, int], block_s: float, patience_s: float
) -> None:
    seats = [seat("r0"), seat("r1", free=False), seat("r3", idle_since_s=1.0)]
    request = asking(known, 100)
    served = Assignment((("q", "r0"),), math.inf)
    assert assign([request], seats, NOW_S, block_s) == (Assignment((), NOW_S + patience_s, ("q",)) if patience_s else served)
    passed = replace(request, passed_s=NOW_S - patience_s)
    assert assign([passed], seats, NOW_S, block_s) == served
    if patience_s:
        not_yet = replace(request, passed_s=NOW_S - patience_s + 1e-6)
        assert assign([not_yet], seats, NOW_S, block_s).passed == ("q",)


@pytest.mark.parametrize(("busy_for_s", "is_waited_for"), [(0.0, True), (0.999, True), (1.0, False), (30.0, False)])
def test_a_replica_that_computes_a_prompt_for_longer_is_not_waited_for(busy_for_s: float, is_waited_for: bool) -> None:
    """It would save one second."""
    seats = [seat("r0"), replace(seat("r1", free=False), busy_until_s=NOW_S + busy_for_s)]
    decided = assign([asking({"r1": 4})], seats, NOW_S, block_s=0.25)
    assert decided == (Assignment((), NOW_S + 1.0, ("q",)) if is_waited_for else Assignment((("q", "r0"),), math.inf))


def test_of_two_busy_replicas_one_is_waited_for_that_may_be_free_in_time() -> None:
    late = replace(seat("r1", free=False), busy_until_s=NOW_S + 5.0)
    decided = assign([asking({"r1": 4, "r2": 2})], [seat("r0"), late, seat("r2", free=False)], NOW_S, block_s=0.25)
    assert decided == Assignment((), NOW_S + 0.5, ("q",))


@pytest.mark.parametrize(("num_blocks", "is_waited_for"), [(5, False), (4, False), (3, True)])
def test_a_replica_that_has_just_been_given_a_prompt_computes_it(num_blocks: int, is_waited_for: bool) -> None:
    """It takes as many quarters of a second as the prompt has blocks; for the second request it would save one second."""
    seats = [seat("r0", idle_since_s=1.0), seat("r1", idle_since_s=2.0)]
    decided = assign([Waiting("first", num_blocks=num_blocks), asking({"r0": 4})], seats, NOW_S, block_s=0.25)
    assert decided.pairs == (("first", "r0"), *([] if is_waited_for else [("q", "r1")]))


def test_a_replica_that_does_not_serve_is_not_waited_for() -> None:
    seats = [seat("r0"), seat("r1", usable=False)]
    assert assign([asking({"r1": 4})], seats, NOW_S).pairs == (("q", "r0"),)
    assert assign([asking({"gone": 4})], seats, NOW_S).pairs == (("q", "r0"),)


def test_replica_that_has_just_refused_is_avoided_whatever_it_has() -> None:
    seats = [seat("r0", idle_since_s=9.0), seat("r1", idle_since_s=1.0)]
    refused = asking({"r1": 4}, avoid=frozenset({"r1"}))
    assert assign([refused], seats, NOW_S).pairs == (("q", "r0"),)
    assert assign([refused], [seat("r1")], NOW_S).pairs == ()
    assert assign([refused], [seat("r0"), seat("r1", free=False)], NOW_S).pairs == (("q", "r0"),), "nor is it waited for"


@given(
    known=st.lists(
        st.dictionaries(st.sampled_from(["r0", "r1", "r2", "r3", "gone"]), st.integers(1, 8), max_size=3), max_size=12
    ),
    ages_s=st.lists(st.none() | st.floats(0, 3), min_size=12, max_size=12),
    kinds=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=4, max_size=4),
)
def test_nobody_is_served_twice_and_no_replica_idles_while_somebody_could_have_it(
    known: list[dict[str, int]], ages_s: list[float | None], kinds: list[tuple[int, bool]]
) -> None:
    seats = [replace(seat(f"r{i}", usable=usable), num_free=free if usable else 0) for i, (free, usable) in enumerate(kinds)]
    waiting = [
        Waiting(f"q{i}", None if age_s is None else NOW_S - age_s, blocks, 8)
        for i, (blocks, age_s) in enumerate(zip(known, ages_s, strict=False))
    ]
    decided = assign(waiting, seats, NOW_S, block_s=0.5)
    assert decided == assign(waiting, list(reversed(seats)), NOW_S, block_s=0.5), "the order of replicas tells nothing"
    requests, replicas = [pair[0] for pair in decided.pairs], [pair[1] for pair in decided.pairs]
    places = {s.name: s.num_free for s in seats}
    assert len(set(requests)) == len(requests)
    assert all(replicas.count(name) <= places[name] for name in places)
    assert set(replicas) <= {name for name, num in places.items() if num}
    if still_free := {name for name, num in places.items() if replicas.count(name) < num}:
        left = [request for request in waiting if request.request_id not in requests]
        busy = {s.name for s in seats if s.is_usable} - still_free
        assert [request.request_id for request in left] == list(decided.passed)
        assert all(busy & set(request.known) for request in left)
        assert all(request.passed_s is None or request.passed_s + STICKY_WAIT_S > NOW_S for request in left)
