"""State of the router after something went wrong once: a replica that was lost, refused or busy is as good as new afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kog_dist.router.affinity import Affinity
from kog_dist.router.link import LinkState, ReplicaLink
from kog_dist.router.requests import BYTES_PER_ID, RequestBook, RoutedRequest
from kog_dist.router.router import NO_REPLICA_S
from kog_dist.router.rules import MAX_LOSSES, Seat, Waiting, assign
from kog_dist.rpc.messages import Done, Error, Generate

from .conftest import FakeReplica, World

Pair = tuple[FakeReplica, FakeReplica]


def test_a_replica_that_was_lost_with_a_request_takes_the_next_one(world: World) -> None:
    """What ran there when it was lost runs nowhere, and does not make it look busy."""
    replica = world.add("r0")
    world.until(lambda: world.states() == {"r0": "ready"})
    client = world.client()
    client.generate("first")
    world.until(lambda: replica.running)
    replica.accept()
    replica.generate(0, 5)
    world.until(lambda: any(getattr(event, "token_ids", None) for event in client.read()))
    replica.die()
    world.until(lambda: client.of(Error))
    replica.come_back()
    world.until(lambda: world.states() == {"r0": "ready"})
    client.generate("second")
    world.until(lambda: replica.running)
    replica.finish()
    world.until(lambda: [event.request_id for event in client.of(Done) if isinstance(event, Done)] == ["second"])


def test_the_time_without_a_replica_begins_when_the_last_one_is_lost(world: World) -> None:
    replica = world.add("r0")
    world.until(lambda: world.states() == {"r0": "ready"})
    world.skip(NO_REPLICA_S + 1)  # the fleet has served for longer than that
    replica.die()
    world.until(lambda: world.states() == {"r0": "lost"})
    client = world.client()
    client.generate("mine")
    world.settle()
    world.skipped_s += NO_REPLICA_S - 5
    world.settle()
    assert client.of(Error) == [], "there may be one again in time"
    replica.come_back()
    world.until(lambda: replica.running)


def test_who_is_sent_back_goes_before_those_that_came_later() -> None:
    book, link = RequestBook(), SimpleNamespace(name="r0", attempt_ids=set())
    for name in ("a", "b", "c"):
        book.arrive(RoutedRequest.arrived(b"peer", Generate(name, "x"), Affinity(), 1.0))
    first = book.waiting["a"]
    book.start(first, link, "attempt", 2.0)  # type: ignore[arg-type]
    assert (list(book.waiting), first.waited_s, link.attempt_ids) == (["b", "c"], 1.0, {"attempt"})
    book.wait_again(first)
    assert [request.request_id for request in book.in_turns()] == ["a", "b", "c"]
    assert (sorted(book.waiting), list(book.unfinished)) == (["a", "b", "c"], ["a", "b", "c"])
    assert (first.link, first.avoid, book.attempts) == (None, frozenset({"r0"}), {})
    assert book.at(link) == []  # type: ignore[arg-type]
    book.remove(first)
    assert [request.request_id for request in book.in_turns()] == ["b", "c"]
    assert (list(book.waiting), list(book.unfinished)) == (["b", "c"], ["b", "c"])


def test_what_waits_counts_what_it_takes() -> None:
    book = RequestBook()
    book.arrive(RoutedRequest.arrived(b"p", Generate("a", "x" * 7), Affinity(), 1.0))
    book.arrive(RoutedRequest.arrived(b"q", Generate("b", prompt_ids=(1, 2, 3)), Affinity(), 1.0))
    assert book.waiting_bytes() == 7 + 3 * BYTES_PER_ID
    assert (book.waiting_bytes(b"p"), book.num_waiting_of(b"p"), book.num_waiting_of(b"r")) == (7, 1, 0)
    assert [request.request_id for request in book.of_client(b"q")] == ["b"]


def test_a_request_is_tried_as_often_as_it_may(world: World) -> None:
    replicas = [world.add(f"r{idx}") for idx in range(MAX_LOSSES + 2)]
    world.until(lambda: list(world.states().values()) == ["ready"] * len(replicas))
    client = world.client()
    client.generate("deadly")
    for _ in range(MAX_LOSSES + 1):
        world.until(lambda: any(replica.running for replica in replicas))
        next(replica for replica in replicas if replica.running).die()
        for replica in replicas:
            if replica._listener is None:
                replica.running.clear()
    world.until(lambda: client.of(Error))
    assert sum(replica._listener is not None for replica in replicas) == 1, "one is left for the others"


def test_of_free_replicas_the_longest_idle_is_taken_and_none_twice() -> None:
    seats = [Seat("r0", True, True, 5.0), Seat("r1", True, True, 3.0), Seat("r2", True, True, 3.0)]
    waiting = [Waiting("a"), Waiting("b", None, {"r0": 1}), Waiting("c", None, {}, 1, frozenset({"r2"})), Waiting("d")]
    assert assign(waiting, seats, 9.0).pairs == (("a", "r1"), ("b", "r0"), ("d", "r2"))


def link_in(state: LinkState, **fields: Any) -> ReplicaLink:
    link = ReplicaLink.__new__(ReplicaLink)
    defaults: dict[str, Any] = {
        "state": state, "reason": "", "report": None, "attempt_ids": set(), "blocked_until_s": 0.0, "_own_prefix": "kr1.",
        "order": SimpleNamespace(is_retiring=False), "welcome": object(),
    }  # fmt: skip
    for name, value in {**defaults, **fields}.items():
        setattr(link, name, value)
    return link


def test_a_replica_is_free_when_nothing_speaks_against_it() -> None:
    def reported(running: str | None, *waiting: str, parallel: int = 1) -> Any:
        return SimpleNamespace(all_running=() if running is None else (running,), waiting=waiting, parallel=parallel)

    for fields, num_free in (
        ({}, 1), ({"attempt_ids": {"kr1.0"}}, 0), ({"blocked_until_s": 5.0}, 1), ({"blocked_until_s": 5.001}, 0),
        ({"report": reported("kr1.0")}, 1), ({"report": reported("theirs")}, 0),
        ({"report": reported("kr1.0", "theirs")}, 0), ({"order": SimpleNamespace(is_retiring=True)}, 0),
        ({"report": reported("kr1.0", parallel=4), "attempt_ids": {"kr1.0"}}, 3),
        ({"report": reported("theirs", "theirs too", parallel=4), "attempt_ids": {"kr1.0"}}, 1),
        ({"report": reported("theirs", "theirs too", parallel=2), "attempt_ids": {"kr1.0"}}, 0),
    ):  # fmt: skip
        assert link_in(LinkState.READY, **fields).num_free(5.0) == num_free, fields
    for state in LinkState:
        assert link_in(state).is_usable() is (state is LinkState.READY)


def test_only_a_replica_that_is_ready_can_fail_and_what_is_refused_stays_so() -> None:
    for state in LinkState:
        link = link_in(state)
        link.failed("why")
        assert link.state is (LinkState.FAILED if state is LinkState.READY else state)
    refused = link_in(LinkState.REFUSED)
    refused.reported(SimpleNamespace(state="ready"))  # type: ignore[arg-type]
    assert refused.state is LinkState.REFUSED
