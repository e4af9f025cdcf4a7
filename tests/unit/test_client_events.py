"""Every request ends with one terminal event and is counted once, whatever its client does meanwhile."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import cast

import pytest

from kog_dist.rpc.client_events import ClientEvents
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import Alive, Done, Error, ErrorCode, Event, FinishReason


@dataclass(eq=False)
class Asked:
    """A request of a client."""

    peer: bytes
    request_id: str
    last_sent_ns: int = 0


@dataclass
class Book:
    """Those that are open."""

    requests: list[Asked]

    def find(self, request_id: str) -> Asked | None:
        """By its id."""
        return next((request for request in self.requests if request.request_id == request_id), None)

    def of_client(self, peer: bytes) -> list[Asked]:
        """By its connection."""
        return [request for request in self.requests if request.peer == peer]

    def remove(self, request: Asked) -> bool:
        """Whether it was in."""
        was_in = request in self.requests
        self.requests = [other for other in self.requests if other is not request]
        return was_in


@dataclass
class Wire:
    """A listener; what becomes of events is told beforehand."""

    fate: Delivery = Delivery.TAKEN
    sent: list[Event] = field(default_factory=list)
    last: list[Event] = field(default_factory=list)

    def send(self, _peer: bytes, event: Event) -> Delivery:
        """Take note of it."""
        self.sent.append(event)
        return self.fate

    def drop(self, _peer: bytes, last: list[Event]) -> None:
        """The same of the last ones."""
        self.last += last

    def is_behind(self, _peer: bytes) -> bool:
        """Nobody is."""
        return False


class Server:
    """Two requests of one client and one of another."""

    def __init__(self) -> None:
        self.wire, self.counters = Wire(), Counters()
        self.first, self.second, self.other = Asked(b"a", "a1"), Asked(b"a", "a2"), Asked(b"b", "b1")
        self.book = Book([self.first, self.second, self.other])
        self.now_ns = 0
        listener = cast(RpcListener, self.wire)
        self.events: ClientEvents[Asked] = ClientEvents("engine", listener, self.book, self.counters, lambda: self.now_ns)

    def counted(self) -> dict[str, int]:
        """Counters that are not 0."""
        return {name: count for name, count in asdict(self.counters).items() if count}


def done(request_id: str) -> Done:
    return Done(request_id, FinishReason.LENGTH, 1, 1, 0.0, 0.0)


@pytest.mark.parametrize(
    ("reason", "counter"),
    [(FinishReason.STOP, "num_completed"), (FinishReason.CANCELLED, "num_cancelled"), (FinishReason.DEADLINE, "num_expired")],
)
def test_an_end_is_counted_and_sent_once(reason: FinishReason, counter: str) -> None:
    server = Server()
    for _ in range(2):
        server.events.end(server.first, reason, [done("a1")])
        server.events.fail(server.first, ErrorCode.RANK_FAILED, "too late")
    assert server.counted() == {counter: 1}
    assert server.wire.sent == [done("a1")]


@pytest.mark.parametrize(("fate", "counter"), [(Delivery.GONE, "num_cancelled"), (Delivery.FULL, "num_failed")])
def test_a_client_that_is_lost_with_its_last_event_counts_only_its_other_requests(fate: Delivery, counter: str) -> None:
    server = Server()
    server.wire.fate = fate
    server.events.end(server.first, FinishReason.STOP, [done("a1"), done("a1")])
    assert server.counted() == {"num_completed": 1, counter: 1, "num_dropped_clients": 1}
    assert server.book.requests == [server.other]
    assert len(server.wire.sent) == 1, "nothing follows to a client that is lost"
    lost = [(event.code, event.request_id) for event in server.wire.last if isinstance(event, Error)]
    assert lost == ([] if fate is Delivery.GONE else [(ErrorCode.SLOW_READER, "a1"), (ErrorCode.SLOW_READER, "a2")])


def test_a_silent_client_hears_that_it_is_not_forgotten() -> None:
    server = Server()
    assert not server.events.keep_alive(server.first, 1)
    assert server.events.keep_alive(server.first, 0, has_moved=True)
    server.now_ns += 250_000_000
    assert server.events.keep_alive(server.first, 0)
    assert not server.events.keep_alive(server.first, 0), "it has just heard something"
    assert server.wire.sent == [Alive("a1", 0)] * 2
