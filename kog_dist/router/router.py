"""The router: clients on one side, replicas on the other. One thread, one loop that waits for nobody.

Requests wait here and a replica gets the next one when it is free. Every accepted request ends in exactly one terminal event.
"""

from __future__ import annotations

import itertools
import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import zmq

from kog_dist.errors import RequestError
from kog_dist.router import frames, rules
from kog_dist.router.affinity import Affinity
from kog_dist.router.clients import RoutedEvents
from kog_dist.router.fleet import Fleet
from kog_dist.router.link import LinkState, ReplicaLink
from kog_dist.router.orders import FleetOrder, latest_packet
from kog_dist.router.reports import fleet_report, status_report, welcome
from kog_dist.router.requests import RequestBook, RoutedRequest
from kog_dist.rpc.client_events import NOT_STARTED, Farewell
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.messages import (
    Accepted,
    BadMessage,
    Cancel,
    Done,
    Drain,
    Error,
    ErrorCode,
    Event,
    Generate,
    Hello,
    PrefillProgress,
    PromptLogprobs,
    Request,
    Status,
    StatusReport,
    Welcome,
    decode_event,
    encode,
)
from kog_dist.runtime.process_page import ProcessPage

MAX_WAITING, MAX_WAITING_OF_ONE = 1024, 256  # requests, of all clients and of one
MAX_WAITING_BYTES, MAX_WAITING_BYTES_OF_ONE = 64 << 20, 16 << 20
NO_REPLICA_S: Final = 30.0  # without any replica that serves or is about to: then waiting requests end
FAREWELL_S: Final = 0.25
_CHORES_S = 0.05
_NEW_SHARE = 0.2  # of the latest request in a mean
_LOOK_AGAIN_S = 0.25  # replicas that were avoided may be free again
_MESSAGES_PER_TURN = 32
_FULL_S = 0.1  # how long a replica is left alone that says its queue is full

_OfRequest: TypeAlias = Accepted | PrefillProgress | PromptLogprobs | Done | Error

# A replica says these of itself, not of the request: another one may do better.
_ELSEWHERE = {ErrorCode.DRAINING, ErrorCode.QUEUE_FULL}
_LOSSES = {
    ErrorCode.RANK_FAILED,
    ErrorCode.STARTUP_FAILED,
    ErrorCode.ENGINE_LOST,
    ErrorCode.SHUTDOWN,
    ErrorCode.DRAIN_TIMEOUT,
    ErrorCode.INTERNAL_ERROR,
}


class Router:
    """All requests, and the fleet of replicas. `turn` does what there is to do; `run` repeats it."""

    def __init__(
        self,
        instance: str,
        listener: RpcListener,
        address: str,
        orders: socket.socket,
        *,
        drain_s: float,
        page: ProcessPage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`orders` is this end of the launcher's socket pair; `address` is where clients connect, for reports. It beats on its
        `page`.
        """
        self.instance = instance
        self.fleet = Fleet(f"kr{secrets.token_hex(4)}.")
        self.counters = Counters()
        self.is_stopped = False  # set from outside: end at once
        self._listener = listener
        self._address = address
        self._orders = orders
        self._drain_s = drain_s
        self._page, self._clock = page, clock
        self._begin_s = clock()
        self._book = RequestBook()
        self._clients = RoutedEvents("router", listener, self._book, self.counters, lambda: round(clock() * 1e9))
        self._affinity = Affinity()
        self._greetings: list[bytes] = []  # clients whose hello waits for the first replica
        self._attempt_idx = itertools.count()
        self._turn_s = 1.0  # how long requests have a replica, lately
        self._block_s = rules.BLOCK_S  # to compute a block of a prompt, lately
        self._look_again_s = 0.0  # when waiting requests should be looked at again
        self._next_chores_s = 0.0
        self._drain_deadline_s: float | None = None
        self._alone_since_s = self._begin_s  # since when no replica serves or is about to
        self._last_report = b""
        self._polled: list[zmq.Socket[bytes]] = []
        self._poller: zmq.Poller | None = None
        self.farewell: Farewell | None = None

    # ---- the loop ----
    def run(self) -> int:
        """Serve until drained, stopped or orphaned. Returns the exit code."""
        while self.farewell is None:
            self.turn(_CHORES_S)
        for request in list(self._book.unfinished.values()):
            self._clients.fail(request, self.farewell.code, self.farewell.message)
        self.close(FAREWELL_S)
        return self.farewell.exit_code

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets but the launcher's; clients that read get what is under way within `linger_s`."""
        self.fleet.close()
        self._listener.close(linger_s)

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens, at most `timeout_s`, and act on it."""
        if self._page is not None:
            self._page.beat()
        now_s = self._clock()
        next_s = min(self.fleet.next_look_s(), self._look_again_s if self._book.waiting else math.inf)
        ready = self._sleep(min(timeout_s, max(0.0, next_s - now_s)))
        now_s = self._clock()
        for link in self.fleet.links():
            if not ready.isdisjoint(link.sockets()):
                for frame in link.receive(_MESSAGES_PER_TURN, now_s):
                    self._take_frame(link, frame, now_s)
        if self._orders.fileno() in ready:
            self._read_orders(now_s)
        for peer, message in self._listener.receive(_MESSAGES_PER_TURN):  # in each turn: it has time limits of its own
            self._answer(peer, message, now_s)
        for link, reason in self.fleet.look(now_s, ready):
            self._lose_replica(link, reason)
        if self._book.waiting and now_s >= self._look_again_s:
            self._dispatch(now_s)
        if now_s >= self._next_chores_s:
            self._next_chores_s = now_s + _CHORES_S
            self._do_chores(now_s)
        self._clients.flush()

    def _sleep(self, timeout_s: float) -> set[zmq.Socket[bytes] | int]:
        """Wait for input, at most `timeout_s`; sockets that have some, and the descriptor of the orders if these have."""
        if (sockets := self.fleet.sockets()) != self._polled or self._poller is None:
            self._polled, self._poller = sockets, zmq.Poller()
            for own in (*sockets, *self._listener.sockets(), self._orders.fileno()):
                self._poller.register(own, zmq.POLLIN)
        return {socket for socket, _ in self._poller.poll(math.ceil(timeout_s * 1000))}

    def _read_orders(self, now_s: float) -> None:
        try:
            packet = latest_packet(self._orders)
        except EOFError:
            self.farewell = Farewell(ErrorCode.ENGINE_LOST, "the launcher of the engines died; start them again", 4)
            return
        if packet is not None:
            self._obey(FleetOrder.from_bytes(packet), now_s)

    def _do_chores(self, now_s: float) -> None:
        """What is not urgent: requests that have heard nothing, drains, time limits, the launcher's report."""
        positions = {request.request_id: position for position, request in enumerate(self._book.in_turns(), 1)}
        for request in list(self._book.unfinished.values()):
            self._clients.keep_alive(request, positions.get(request.request_id, 0))
        self._expire(now_s)
        self._look_after_drain(now_s)
        report = fleet_report(self.fleet, len(self._book.waiting), self._drain_deadline_s is not None, self._address).to_bytes()
        if report != self._last_report:
            try:
                self._orders.send(report)
                self._last_report = report
            except BlockingIOError:
                pass  # the launcher is busy; it gets the next one
            except OSError:
                pass  # it is gone, which the next chores see

    def _obey(self, order: FleetOrder, now_s: float) -> None:
        for link in self.fleet.obey(order, now_s):
            self._lose_replica(link, "its launcher ended")
        self._look_again_s = 0.0
        if order.is_draining:
            self._begin_drain(now_s)

    # ---- messages of clients ----
    def _answer(self, peer: bytes, message: Request, now_s: float) -> None:
        match message:
            case Generate():
                self._take_request(peer, message, now_s)
            case Cancel():
                if (request := self._clients.to_cancel(peer, message.request_id)) is not None:
                    self._clients.cancel(request, now_s)
                    if peer != request.peer:
                        self._listener.send(peer, self._report(now_s))
            case Hello():
                self._greetings.append(peer)
                self._greet()
            case Status():
                self._listener.send(peer, self._report(now_s))
            case Drain():
                self._begin_drain(now_s)
                self._listener.send(peer, self._report(now_s))

    def _take_request(self, peer: bytes, message: Generate, now_s: float) -> None:
        try:
            self._clients.check_new(message.request_id, is_draining=self._drain_deadline_s is not None)
            self._check_room(peer)
        except RequestError as error:
            self._clients.refuse(peer, message.request_id, error)
            return
        request = RoutedRequest.arrived(peer, message, self._affinity, now_s)
        self._book.arrive(request)
        self._look_again_s = 0.0

    def _check_room(self, peer: bytes) -> None:
        book, why = self._book, ""
        if len(book.waiting) >= MAX_WAITING or book.waiting_bytes() >= MAX_WAITING_BYTES:
            why = f"{len(book.waiting)} requests are waiting already"
        elif book.num_waiting_of(peer) >= MAX_WAITING_OF_ONE or book.waiting_bytes(peer) >= MAX_WAITING_BYTES_OF_ONE:
            why = f"{book.num_waiting_of(peer)} requests of this client are waiting already"
        if why:
            retry_after_s = self._turn_s / max(1, self.fleet.num_usable())
            raise RequestError(ErrorCode.QUEUE_FULL, f"{why}; try again later", retry_after_s)

    def _greet(self) -> None:
        """Answer to hellos, once a replica has said what it serves."""
        if (answer := welcome(self.fleet, self.instance, is_draining=self._drain_deadline_s is not None)) is not None:
            for peer in self._greetings:
                self._listener.send(peer, answer)
            self._greetings.clear()
        del self._greetings[:-MAX_WAITING]

    def _report(self, now_s: float) -> StatusReport:
        return status_report(
            self.fleet,
            self.instance,
            self.counters,
            self._book.attempts,
            [request.request_id for request in self._book.in_turns()],
            max_waiting=MAX_WAITING,
            max_waiting_of_one=MAX_WAITING_OF_ONE,
            uptime_s=now_s - self._begin_s,
            num_bad_messages=self._listener.num_bad_messages,
            is_draining=self._drain_deadline_s is not None,
        )

    # ---- requests and replicas ----
    def _dispatch(self, now_s: float) -> None:
        waiting = (request.waiting() for request in self._book.in_turns())
        decided = rules.assign(waiting, self.fleet.seats(now_s), now_s, self._block_s)
        self._look_again_s = min(decided.look_again_s, now_s + _LOOK_AGAIN_S)
        for request_id in decided.passed:
            request = self._book.waiting[request_id]
            request.passed_s = now_s if request.passed_s is None else request.passed_s
        for request_id, name in decided.pairs:
            self._hand_over(self._book.waiting[request_id], self.fleet.link(name), now_s)

    def _hand_over(self, request: RoutedRequest, link: ReplicaLink, now_s: float) -> None:
        attempt_id = f"{self.fleet.own_prefix}{next(self._attempt_idx)}"
        changes: dict[str, object] = {"request_id": attempt_id}
        if request.message.deadline_s is not None:
            changes["deadline_s"] = max(0.001, request.deadline_s - now_s)
        if not link.send_frame(frames.with_fields(encode(request.message), **changes)):
            link.failed("it takes no more requests")
            return
        self._book.start(request, link, attempt_id, now_s)
        link.busy_until_s = now_s + request.waiting().prefill_s(link.name, self._block_s)
        request.seen_by(link.name, self._affinity)

    def _take_frame(self, link: ReplicaLink, frame: bytes, now_s: float) -> None:
        try:
            if frames.is_tokens(frame):
                self._pass_tokens(frames.read_tokens(frame), now_s)
            else:
                self._take_event(link, decode_event(frame), now_s)
        except BadMessage as error:
            link.refuse(f"it sent what is not the protocol: {error}")
            self._lose_replica(link, link.reason)

    def _pass_tokens(self, body: dict[str, object], now_s: float) -> None:
        request = self._book.attempts.get(str(body["request_id"]))
        if request is None:
            return
        text, token_ids = body["text"], body["token_ids"]
        assert isinstance(text, str), "frames.read_tokens has checked both"
        assert isinstance(token_ids, list)
        request.keep(text, token_ids)
        self.counters.num_tokens += len(token_ids)
        self._clients.send_frame(request, frames.write_tokens(body, request.request_id, request.waited_s))

    def _take_event(self, link: ReplicaLink, event: Event, now_s: float) -> None:
        if isinstance(event, Welcome):
            self.fleet.greeted(link, event)
        elif isinstance(event, StatusReport):
            link.reported(event)
            self._greet()
            self._look_again_s = 0.0
        elif isinstance(event, _OfRequest) and event.request_id is not None:
            self._take_stream_event(link, event, now_s)

    def _take_stream_event(self, link: ReplicaLink, event: _OfRequest, now_s: float) -> None:
        attempt_id = event.request_id
        assert attempt_id is not None
        if isinstance(event, Done | Error):
            link.attempt_ids.discard(attempt_id)
            link.idle_since_s, self._look_again_s = now_s, 0.0
        request = self._book.attempts.get(attempt_id)
        if request is None:
            return  # its client is gone, or did not want it any more
        if isinstance(event, Error):
            self._take_error(request, link, event, now_s)
        elif isinstance(event, Done):
            request.seen_by(link.name, self._affinity)
            self._turn_s += _NEW_SHARE * (event.total_s - self._turn_s)
            if (block_s := request.block_s(event)) is not None:
                self._block_s += _NEW_SHARE * (block_s - self._block_s)
            self._clients.finish(request, event)
        elif not isinstance(event, Accepted) or not request.is_accepted:
            request.is_accepted = True
            request.is_streamed = request.is_streamed or isinstance(event, PromptLogprobs)
            self._clients.pass_on(request, event)

    def _take_error(self, request: RoutedRequest, link: ReplicaLink, event: Error, now_s: float) -> None:
        if event.code in _ELSEWHERE and not request.is_streamed:
            if event.code is ErrorCode.DRAINING:
                link.failed("it is being stopped")
            link.blocked_until_s = now_s + _FULL_S
            self._book.wait_again(request)
        elif event.code in _LOSSES:
            link.failed(event.message)
            self._lose_attempt(request, link, event.code, event.message)
        else:
            end = self._clients.fail if request.is_accepted else self._clients.give_up
            end(request, event.code, event.message)

    def _lose_replica(self, link: ReplicaLink, reason: str) -> None:
        """Everything that was at a replica that is gone."""
        self._affinity.forget(link.name)
        for request in self._book.at(link):
            self._lose_attempt(request, link, ErrorCode.ENGINE_LOST, reason)

    def _lose_attempt(self, request: RoutedRequest, link: ReplicaLink, code: ErrorCode, reason: str) -> None:
        """Try a request elsewhere if its client has not been sent any of the answer; else it ends here."""
        self._look_again_s = 0.0
        request.lost.append(link.name)
        if request.is_streamed:
            message = f"replica {link.name} was lost in the middle of the answer ({reason}); send the request again"
            self._clients.fail(request, code, message)
        elif len(request.lost) > rules.MAX_LOSSES:
            names = " and ".join(request.lost)
            message = f"replicas {names} were lost with this request, which is not tried again ({reason})"
            self._clients.fail(request, code, message)
        else:
            self._book.wait_again(request)

    # ---- time limits and the end ----
    def _expire(self, now_s: float) -> None:
        """End requests that have waited too long, by their own limit or because there is nothing to wait for."""
        for request in [request for request in self._book.waiting.values() if now_s >= request.deadline_s]:
            message = f"the request has waited for {now_s - request.arrived_s:.1f} s, as long as it was allowed to take"
            self._clients.give_up(request, ErrorCode.DEADLINE_EXCEEDED, message)
        states = {link.state for link in self.fleet.links()}
        if states & {LinkState.READY, LinkState.LOADING, LinkState.DRAINING}:
            self._alone_since_s = now_s
        elif self._book.waiting and now_s - self._alone_since_s > NO_REPLICA_S:
            message = f"no replica has been ready for {NO_REPLICA_S:g} s; see `kog-client status`"
            for request in list(self._book.waiting.values()):
                self._clients.fail(request, ErrorCode.ENGINE_LOST, message)

    def _begin_drain(self, now_s: float) -> None:
        if self._drain_deadline_s is None:
            self._drain_deadline_s = now_s + self._drain_s
            self._dispatch(now_s)  # what a free replica can take at once counts as running
            for request in list(self._book.waiting.values()):
                self._clients.fail(request, ErrorCode.DRAINING, NOT_STARTED)

    def _look_after_drain(self, now_s: float) -> None:
        if self.is_stopped:
            self.farewell = Farewell(ErrorCode.SHUTDOWN, "the engines were stopped before the answer was complete", 0)
        if self._drain_deadline_s is None or self.farewell is not None:
            return
        is_idle = not self._book.unfinished and not self._listener.has_backlog
        if is_idle or now_s >= self._drain_deadline_s:
            self.farewell = Farewell.drained(self._drain_s, is_cut=bool(self._book.unfinished))
