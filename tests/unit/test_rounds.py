"""Clients take turns; who is served is the same as that of an obvious twin, for any order of coming and going."""

from __future__ import annotations

import random

from kog_dist.runtime.rounds import Rounds


def filled(names: str) -> Rounds[str]:
    """`a1a2b1`: clients are letters."""
    rounds = Rounds[str]()
    for first in range(0, len(names), 2):
        rounds.add(names[first], names[first : first + 2])
    return rounds


def test_one_of_each_client_comes_before_the_second_of_any() -> None:
    rounds = filled("a1a2a3b1c1c2")
    assert list(rounds) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert (len(rounds), rounds.num_of("a"), rounds.num_of("z")) == (6, 3, 0)
    assert [rounds.pop() for _ in range(6)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert (len(rounds), list(rounds)) == (0, [])


def test_who_has_had_a_turn_stands_behind_those_who_came_meanwhile() -> None:
    rounds = filled("a1a2b1")
    assert rounds.pop() == "a1"
    rounds.add("c", "c1")
    assert list(rounds) == ["b1", "a2", "c1"], "it stood there when the third came"


def test_a_turn_may_be_another_ones_than_the_next() -> None:
    rounds = filled("a1a2b1b2")
    rounds.take("b", "b2")
    assert list(rounds) == ["a1", "b1", "a2"]
    rounds.take("a", "a2")
    assert list(rounds) == ["b1", "a1"]


def test_what_is_tried_again_comes_first() -> None:
    rounds = filled("a1b1b2")
    rounds.add_first("b", "b0")
    rounds.add_first("c", "c0")
    assert list(rounds) == ["c0", "b0", "a1", "b1", "b2"]


def test_what_nobody_wants_costs_no_turn() -> None:
    rounds = filled("a1a2b1")
    assert rounds.remove("a", "a1")
    assert not rounds.remove("a", "a1")
    assert not rounds.remove("z", "a1")
    assert list(rounds) == ["a2", "b1"]
    assert rounds.remove("b", "b1")
    assert rounds.num_of("b") == 0
    rounds.clear()
    assert list(rounds) == []


def test_nobody_waits_for_more_than_one_of_each_other_client() -> None:
    chance = random.Random(3)
    rounds, waited, clients = Rounds[tuple[int, int]](), dict[int, int](), range(4)
    for number in range(3000):
        client = chance.choice(clients)
        if chance.random() < 0.5:
            rounds.add(client, (client, number))
            waited.setdefault(client, 0)
        elif len(rounds):
            served, _ = rounds.pop()
            waited = {other: count + (other != served) for other, count in waited.items() if rounds.num_of(other)}
            if rounds.num_of(served):
                waited[served] = 0
        assert max(waited.values(), default=0) < len(clients)
