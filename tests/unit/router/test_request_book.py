"""What the router's book of requests says of each, from its arrival to its end."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.router.affinity import IDS_BLOCK, TEXT_BLOCK_BYTES, Affinity
from kog_dist.router.requests import BYTES_PER_ID, RequestBook, RoutedRequest
from kog_dist.rpc.messages import Done, FinishReason, Generate


def routed(name: str, peer: bytes = b"p", prompt: str | None = "x", **options: Any) -> RoutedRequest:
    return RoutedRequest.arrived(peer, Generate(name, prompt, **options), options.pop("affinity", Affinity()), 10.0)


def link(name: str) -> Any:
    return SimpleNamespace(name=name, attempt_ids=set())


def test_a_request_is_in_one_place_at_a_time() -> None:
    book, first, second, other = RequestBook(), routed("a"), routed("b", prompt="long prompt"), routed("c", b"q")
    for request in (first, second, other):
        book.arrive(request)
    assert [request.request_id for request in book.in_turns()] == ["a", "c", "b"], "clients take turns"
    assert (book.num_waiting_of(b"p"), book.num_waiting_of(b"q"), book.num_waiting_of(b"r")) == (2, 1, 0)
    assert (book.waiting_bytes(), book.waiting_bytes(b"p"), book.waiting_bytes(b"q")) == (13, 12, 1)
    assert book.of_client(b"p") == [first, second]
    one, two = link("one"), link("two")
    book.start(first, one, "a.1", 12.5)
    assert (first.link, first.attempt_id, first.waited_s) == (one, "a.1", 2.5)
    assert (book.at(one), book.at(two), one.attempt_ids) == ([first], [], {"a.1"})
    assert (list(book.waiting), list(book.attempts), list(book.unfinished)) == (["b", "c"], ["a.1"], ["a", "b", "c"])
    assert [request.request_id for request in book.in_turns()] == ["c", "b"]
    book.wait_again(first)
    assert first.link is None
    assert (first.attempt_id, first.avoid, book.at(one)) == ("", frozenset({"one"}), [])
    assert next(request for request in book.in_turns() if request.peer == b"p") is first, "before those behind it"
    assert book.find("a") is first
    assert book.remove(first) is True
    assert book.remove(first) is False, "it is gone"
    assert book.find("a") is None
    again = routed("b")
    assert book.remove(again) is False, "another request of the same name"
    book.start(second, two, "b.1", 11.0)
    assert book.remove(second) is True
    assert (list(book.waiting), list(book.attempts), list(book.unfinished)) == (["c"], [], ["c"])
    assert [request.request_id for request in book.in_turns()] == ["c"]


def test_what_a_request_takes_and_until_when_it_is_wanted() -> None:
    ids = routed("a", prompt=None, prompt_ids=(1, 2, 3))
    assert (ids.num_bytes, routed("b", prompt="four").num_bytes) == (3 * BYTES_PER_ID, 4)
    assert (ids.deadline_s, routed("c", deadline_s=5.0).deadline_s) == (math.inf, 15.0)
    assert ids.last_sent_ns == 10_000_000_000
    assert ids.waiting().num_blocks == 1, "at least one"


def test_a_replica_that_has_seen_an_answer_is_known_for_it() -> None:
    affinity = Affinity()
    text = routed("a", prompt="x" * TEXT_BLOCK_BYTES, conversation="talk")
    text.keep("y" * TEXT_BLOCK_BYTES, [5, 6])
    assert (text.is_streamed, text.num_tokens, text.answer_ids) == (True, 2, [5, 6])
    text.seen_by("one", affinity)
    ids = routed("b", prompt=None, prompt_ids=tuple(range(IDS_BLOCK)))
    ids.seen_by("two", affinity)

    def known(prompt: str | None, **options: Any) -> dict[str, int]:
        return dict(RoutedRequest.arrived(b"p", Generate("n", prompt, **options), affinity, 0.0).known)

    assert known("x" * TEXT_BLOCK_BYTES + "y" * TEXT_BLOCK_BYTES) == {"one": 2}
    assert known("x" * TEXT_BLOCK_BYTES + "z" * TEXT_BLOCK_BYTES) == {"one": 1}
    assert known(None, prompt_ids=(*range(IDS_BLOCK), *range(IDS_BLOCK))) == {"two": 1}
    assert known("new", conversation="talk") == {"one": 1}, "who has served it has all of it"
    assert known("z" * 3 * TEXT_BLOCK_BYTES, conversation="talk") == {"one": 3}
    assert known("new", conversation="other") == {}
    assert known("x" * TEXT_BLOCK_BYTES, cache_salt="s") == {}


@pytest.mark.parametrize(
    ("num_cached", "prefill_s", "found"), [(0, 2.0, 0.25), (4 * IDS_BLOCK, 2.0, 0.5), (5 * IDS_BLOCK, 2.0, None), (0, None, None)]
)
def test_what_a_block_of_a_prompt_costs_is_told_by_four_of_them(
    num_cached: int, prefill_s: float | None, found: float | None
) -> None:
    request = routed("a", prompt=None, prompt_ids=tuple(range(8 * IDS_BLOCK)))
    done = Done("a", FinishReason.STOP, 8 * IDS_BLOCK, 1, 0.0, 3.0, prefill_s, num_cached_tokens=num_cached)
    assert request.block_s(done) == found
