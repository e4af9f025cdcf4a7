"""The router's clients: what they are sent, how their requests end, and what becomes of those that are gone or do not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kog_dist.router import frames
from kog_dist.router.requests import RequestBook, RoutedRequest
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import Delivery, RpcListener, error_event
from kog_dist.rpc.messages import Alive, Cancel, Done, ErrorCode, Event, FinishReason, encode

ALIVE_EVERY_S: Final = 0.25


class ClientSide:
    """Every request leaves the book here, with its one terminal event."""

    def __init__(self, listener: RpcListener, book: RequestBook, counters: Counters, clock: Callable[[], float]) -> None:
        self._listener, self._book, self._counters, self._clock = listener, book, counters, clock

    # ---- while a request runs ----
    def send(self, request: RoutedRequest, event: Event) -> None:
        """Send an event that a replica has sent, under the client's id."""
        self.send_frame(request, frames.with_fields(encode(event), request_id=request.request_id))

    def send_frame(self, request: RoutedRequest, frame: bytes) -> None:
        """Send to a request's client, and act when it is gone or does not read."""
        request.last_sent_s = self._clock()
        delivery = self._listener.send_frame(request.peer, frame)
        if delivery is Delivery.GONE:
            self._forget(request.peer)
        elif delivery is Delivery.FULL:
            self._drop(request)

    def keep_alive(self, now_s: float) -> None:
        """Tell clients that have heard nothing for a while that they are not forgotten; finds out which are gone."""
        positions = {request_id: position for position, request_id in enumerate(self._book.waiting)}
        for request in list(self._book.unfinished.values()):
            if now_s - request.last_sent_s >= ALIVE_EVERY_S and not self._listener.is_behind(request.peer):
                alive = Alive(request.request_id, positions.get(request.request_id, -1) + 1)
                self.send_frame(request, encode(alive))

    def flush(self) -> None:
        """Try again to send what clients have not read."""
        if self._listener.has_backlog:
            for gone in self._listener.flush():
                self._forget(gone)

    # ---- ends of a request ----
    def finish(self, request: RoutedRequest, event: Done) -> None:
        """It ended well, as its replica says; times count from its arrival here."""
        self._remove(request, is_over=True)
        match event.finish_reason:
            case FinishReason.CANCELLED:
                self._counters.num_cancelled += 1
            case FinishReason.DEADLINE:
                self._counters.num_expired += 1
            case _:
                self._counters.num_completed += 1
        waited_s = request.waited_s
        changes: dict[str, object] = {"request_id": request.request_id, "queue_s": event.queue_s + waited_s}
        changes["total_s"] = event.total_s + waited_s
        changes["ttft_s"] = None if event.ttft_s is None else event.ttft_s + waited_s
        self.send_frame(request, frames.with_fields(encode(event), **changes))

    def cancel(self, request: RoutedRequest) -> None:
        """Somebody does not want it any more."""
        self._remove(request, is_over=False)
        self._counters.num_cancelled += 1
        total_s = self._clock() - request.arrived_s
        queue_s = total_s if request.link is None else request.waited_s
        num_prompt_tokens = len(request.message.prompt_ids or ())  # of a text only its replica knows
        done = Done(request.request_id, FinishReason.CANCELLED, num_prompt_tokens, request.num_tokens, queue_s, total_s)
        self.send_frame(request, encode(done))

    def fail(self, request: RoutedRequest, code: ErrorCode, message: str) -> None:
        """It ends without its answer."""
        self._remove(request, is_over=True)
        self._counters.num_failed += 1
        self.send_frame(request, encode(error_event(code, message, request.request_id)))

    def refuse(self, request: RoutedRequest, code: ErrorCode, message: str) -> None:
        """A replica did not take it, and no other one would."""
        self._remove(request, is_over=True)
        if code is ErrorCode.DEADLINE_EXCEEDED:
            self._counters.num_expired += 1
        else:
            self._counters.num_refused += 1
        self.send_frame(request, encode(error_event(code, message, request.request_id)))

    def _remove(self, request: RoutedRequest, *, is_over: bool) -> None:
        """Take a request off the books; a replica that still has it is told that nobody wants it any more."""
        self._book.remove(request)
        if request.link is not None and not is_over:
            request.link.send(Cancel(request.attempt_id))

    def _forget(self, peer: bytes) -> None:
        """The client is no longer connected: nobody is left to be told how its requests end."""
        theirs = self._book.of_peer(peer)
        for request in theirs:
            self._remove(request, is_over=False)
        self._counters.num_cancelled += len(theirs)
        self._counters.num_dropped_clients += bool(theirs)

    def _drop(self, behind: RoutedRequest) -> None:
        """The client does not read: its requests end, and all it will find is the reason."""
        requests = [behind, *(request for request in self._book.of_peer(behind.peer) if request is not behind)]
        message = "the client did not read its events; more than the buffer of this router holds were waiting"
        for request in requests:
            self._remove(request, is_over=False)
            self._counters.num_failed += 1
        self._counters.num_dropped_clients += 1
        last = [error_event(ErrorCode.SLOW_READER, message, request.request_id) for request in requests]
        self._listener.drop(behind.peer, last)
