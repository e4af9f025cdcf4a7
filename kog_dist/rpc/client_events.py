"""How every server of requests treats its clients: what they are sent, how their requests end, who is gone or does not read.

The coordinator, the router and the benchmarks' engine have one each. Here a request leaves the book of open requests, with its
one terminal event, and is counted once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from kog_dist.errors import RequestError
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import Delivery, RpcListener, error_event
from kog_dist.rpc.messages import Alive, ErrorCode, Event, FinishReason

ALIVE_EVERY_NS: Final = 250_000_000
EXIT_DRAIN_TIMEOUT: Final = 5  # of the process: it was drained, and the limit cut off a request that was running
NOT_STARTED: Final = "the engine is being stopped and does not start this request any more"


class OpenRequest(Protocol):
    """A request that has not ended. `last_sent_ns`: when its client was sent something."""

    @property
    def peer(self) -> bytes:
        """The connection that it came from."""

    @property
    def request_id(self) -> str:
        """The client's name for it."""

    last_sent_ns: int


_Request = TypeVar("_Request", bound=OpenRequest)


class OpenRequestBook(Protocol[_Request]):
    """All open requests of a server."""

    def find(self, request_id: str) -> _Request | None:
        """The one with this id, from whichever connection."""

    def of_client(self, peer: bytes) -> Sequence[_Request]:
        """Those of one connection."""

    def remove(self, request: _Request) -> bool:
        """Take one out; False if it is not in."""


class Farewell(NamedTuple):
    """Why a server ends: what requests that are not finished are told, and the exit code."""

    code: ErrorCode
    message: str
    exit_code: int

    @classmethod
    def drained(cls, drain_s: float, *, is_cut: bool) -> Farewell:
        """Of a drain that is over; `is_cut`: a request was running still."""
        message = f"the engine is being stopped and the answer was not complete within {drain_s:g} s"
        return cls(ErrorCode.DRAIN_TIMEOUT, message, EXIT_DRAIN_TIMEOUT if is_cut else 0)


class ClientEvents(Generic[_Request]):
    """Sends to the clients of open requests, and ends requests."""

    def __init__(
        self,
        server: str,
        listener: RpcListener,
        requests: OpenRequestBook[_Request],
        counters: Counters,
        clock: Callable[[], int],
    ) -> None:
        """`server`: what this process is to a client that does not read. `clock`: nanoseconds."""
        self._server, self._listener, self._requests, self._counters = server, listener, requests, counters
        self._clock = clock

    # ---- before a request is open ----
    def check_new(self, request_id: str, *, is_draining: bool) -> None:
        """Raises RequestError if no request of this id may come now."""
        if is_draining:
            raise RequestError(ErrorCode.DRAINING, "the engine is being stopped and takes no new requests")
        if self._requests.find(request_id) is not None:
            raise RequestError(ErrorCode.DUPLICATE_REQUEST_ID, f"a request {request_id!r} is not finished yet; choose another id")

    def refuse(self, peer: bytes, request_id: str, error: RequestError) -> None:
        """Answer to a request that does not become an open one."""
        code = ErrorCode(error.code) if error.code in set(ErrorCode) else ErrorCode.INVALID_REQUEST
        self._counters.refused(code)
        self._listener.send(peer, error_event(code, str(error), request_id, error.retry_after_s))

    def to_cancel(self, peer: bytes, request_id: str) -> _Request | None:
        """The open request that `peer` asks to cancel; it is told if there is none."""
        request = self._requests.find(request_id)
        if request is None:
            message = f"no request {request_id!r} is waiting or running"
            self._listener.send(peer, error_event(ErrorCode.UNKNOWN_REQUEST, message, request_id))
        return request

    # ---- while a request is open ----
    def send(self, request: _Request, event: Event) -> bool:
        """Send to a request's client; False if that ended the client's requests."""
        return self._has_gone_out(request, self._listener.send(request.peer, event))

    def send_frame(self, request: _Request, frame: bytes) -> bool:
        """The same for an event that is encoded already."""
        return self._has_gone_out(request, self._listener.send_frame(request.peer, frame))

    def _has_gone_out(self, request: _Request, delivery: Delivery) -> bool:
        request.last_sent_ns = self._clock()
        if delivery is Delivery.GONE:
            self.forget(request.peer)
        elif delivery is Delivery.FULL:
            self._drop(request)
        return delivery is Delivery.TAKEN

    def keep_alive(self, request: _Request, position: int, *, has_moved: bool = False) -> bool:
        """Say where a request is in the queue, after a silence or because it `has_moved`; finds out whether its client is gone.

        Returns whether it was said: a client that is behind is spared.
        """
        is_silent = self._clock() - request.last_sent_ns >= ALIVE_EVERY_NS
        if not (is_silent or has_moved) or self._listener.is_behind(request.peer):
            return False
        self.send(request, Alive(request.request_id, position))
        return True

    def flush(self) -> None:
        """Try again to send what clients have not read. Call once per turn of the loop."""
        for gone in self._listener.flush():
            self.forget(gone)

    # ---- ends of a request ----
    def end(self, request: _Request, reason: FinishReason, events: Iterable[Event]) -> None:
        """End a request that went well, was cancelled or ran out of its time; `events` are its last ones."""
        if self._requests.remove(request):  # else it ended with its client a moment ago
            self._finished(request, reason, events)

    def _finished(self, request: _Request, reason: FinishReason, events: Iterable[Event]) -> None:
        self._counters.finished(reason)
        for event in events:
            if not self.send(request, event):
                return

    def fail(self, request: _Request, code: ErrorCode, message: str) -> None:
        """End a request without its answer."""
        if self._requests.remove(request):
            self._counters.failed(code)
            self.send(request, error_event(code, message, request.request_id))

    def forget(self, peer: bytes) -> None:
        """The client is no longer connected: nobody is left to be told how its requests end."""
        num_removed = sum([self._withdraw(request) for request in self._requests.of_client(peer)])
        self._counters.num_cancelled += num_removed
        self._counters.num_dropped_clients += bool(num_removed)

    def _drop(self, behind: _Request) -> None:
        """The client does not read: its requests end, and all it will find is the reason."""
        others = [request for request in self._requests.of_client(behind.peer) if request is not behind]
        message = f"the client did not read its events; more than the buffer of this {self._server} holds were waiting"
        self._counters.num_failed += sum([self._withdraw(request) for request in (behind, *others)])
        self._counters.num_dropped_clients += 1
        last = [error_event(ErrorCode.SLOW_READER, message, request.request_id) for request in (behind, *others)]
        self._listener.drop(behind.peer, last)

    def _withdraw(self, request: _Request) -> bool:
        """Remove a request because of its client, while others may still be at work on it."""
        return self._requests.remove(request)
