"""The order in which waiting requests run, and who is refused."""

from __future__ import annotations

from collections import Counter
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.errors import RequestError
from kog_dist.workers.coordinator.request_queue import FIRST_RETRY_S, RequestQueue
from kog_dist.workers.coordinator.streams import RequestStream


class Stream:
    """What the queue knows of a request."""

    def __init__(self, name: str) -> None:
        self.name, self.peer = name, name[0].encode()

    def __repr__(self) -> str:
        return self.name


def queue_of(*names: str, limit: int = 100, client_limit: int = 100) -> RequestQueue:
    queue = RequestQueue(limit, client_limit)
    for name in names:
        add(queue, name)
    return queue


def add(queue: RequestQueue, name: str) -> RequestStream:
    stream = cast(RequestStream, Stream(name))
    queue.add(stream)
    return stream


def names(queue: RequestQueue) -> list[str]:
    return [str(stream) for stream in queue]


def test_connections_take_turns_and_each_has_its_order() -> None:
    queue = queue_of("a1", "a2", "a3", "b1", "c1", "c2")
    order = ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert names(queue) == order
    ran = []
    while queue:
        ran.append(str(queue.pop()))
        assert names(queue) == order[len(ran) :], "what was foretold is what happens"
        queue.turn_over(ran[-1][0].encode(), 1.0)
    assert ran == order


def test_a_connection_whose_last_request_was_taken_out_has_no_turn() -> None:
    queue = queue_of("b1")
    only = add(queue, "a1")
    queue.add(gone := cast(RequestStream, Stream("c1")))
    assert queue.remove(gone)
    assert not queue.remove(gone)
    queue.turn_over(queue.pop().peer, 1.0)
    assert queue.remove(only)
    assert (len(queue), names(queue)) == (0, [])
    add(queue, "b2")
    assert str(queue.pop()) == "b2"


def test_who_is_taken_out_of_turn_has_its_connection_s_turn() -> None:
    queue = queue_of("a1", "b1", "c1")
    taken = add(queue, "a2")
    queue.take(taken)
    assert names(queue) == ["b1", "c1", "a1"]
    queue.turn_over(b"a", 1.0)
    assert names(queue) == ["b1", "c1", "a1"]


def test_who_comes_while_another_runs_is_next() -> None:
    queue = queue_of("a1", "a2", "a3")
    queue.pop()
    add(queue, "b1")
    assert names(queue) == ["b1", "a2", "a3"]
    queue.turn_over(b"a", 1.0)
    assert names(queue) == ["b1", "a2", "a3"]


def test_newcomers_do_not_hold_up_those_who_wait() -> None:
    """A client that makes a connection for each request cannot starve another."""
    queue = queue_of("a1", "a2")
    ran = queue.pop()
    for newcomer in "bcdefgh":
        add(queue, f"{newcomer}1")
        queue.turn_over(ran.peer, 1.0)
        ran = queue.pop()
        if str(ran) == "a2":
            return
    pytest.fail("a2 was never run")


def test_removing_changes_nothing_else() -> None:
    queue = queue_of("a1", "b1")
    second = add(queue, "b2")
    add(queue, "c1")
    assert queue.remove(second)
    assert not queue.remove(second), "it is gone"
    assert names(queue) == ["a1", "b1", "c1"]
    assert not queue.remove(queue.pop()), "it runs"


def test_bounds_and_when_to_try_again() -> None:
    queue = queue_of("a1", "a2", "b1", limit=4, client_limit=2)
    with pytest.raises(RequestError, match="2 requests of this client are waiting") as client_full:
        queue.check_room(b"a")
    assert (client_full.value.code, client_full.value.retry_after_s) == ("queue_full", 2 * FIRST_RETRY_S)
    queue.check_room(b"c")
    add(queue, "c1")
    with pytest.raises(RequestError, match="4 requests are waiting already") as full:
        queue.check_room(b"d")
    assert full.value.retry_after_s == FIRST_RETRY_S
    for seconds in (0.25, 0.75):
        queue.turn_over(queue.pop().peer, seconds)
    queue.check_room(b"d")
    for name in ("d1", "d2"):
        add(queue, name)
    with pytest.raises(RequestError, match=r"again in about 0.5 s") as later:
        queue.check_room(b"e")
    assert later.value.retry_after_s == 0.5


def test_of_those_that_run_together_each_connection_has_as_many() -> None:
    queue = queue_of("a1", "a2", "a3", "a4", "b1", "c1")
    assert names(queue) == ["a1", "b1", "c1", "a2", "a3", "a4"]
    assert [str(queue.pop()) for _ in range(4)] == ["a1", "b1", "c1", "a2"]
    for name in ("c2", "b2", "d1"):
        add(queue, name)
    assert names(queue) == ["d1", "c2", "b2", "a3", "a4"], "who has none, who has one, who has two"
    queue.turn_over(b"a", 1.0)
    queue.turn_over(b"a", 1.0)
    assert names(queue) == ["d1", "a3", "c2", "b2", "a4"]
    with pytest.raises(RequestError, match=r"again in about 0\.5 s"):  # two run, of a second each
        RequestQueue.check_room(queue, b"e", num_others=100)


@given(st.lists(st.sampled_from(["a", "b", "c", "d", "run", "end"]), max_size=60))
def test_nobody_waits_for_two_requests_of_another(actions: list[str]) -> None:
    queue, is_running = RequestQueue(100, 100), False
    waiting: dict[str, Counter[str]] = {}  # by request: how often each connection had its turn since it came
    for number, action in enumerate(actions):
        if action == "run" and queue and not is_running:
            ran, is_running = str(queue.pop()), True
            del waiting[ran]
            for name, turns in waiting.items():
                turns[ran[0]] += 1
                assert ran[0] != name[0] or int(ran[1:]) < int(name[1:]), "first come first served within one connection"
                assert turns[ran[0]] <= 1 + turns[name[0]], "turns of another alternate with one's own"
        elif action == "end" and is_running:
            queue.turn_over(ran[0].encode(), 0.1)
            is_running = False
        elif action in "abcd":
            name = f"{action}{number}"
            add(queue, name)
            waiting[name] = Counter()
    assert sorted(names(queue)) == sorted(waiting)
