"""One RPC connection in asyncio: many requests, each with a sink that hears its events; a lost engine is one error for each."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

import zmq

from kog_dist.errors import LaunchError
from kog_dist.gateway.links import LinkLost, open_link
from kog_dist.rpc.listener import error_event
from kog_dist.rpc.messages import (
    BadMessage,
    Cancel,
    Done,
    Error,
    ErrorCode,
    Event,
    Generate,
    Request,
    Tokens,
    decode_event,
    encode,
)
from kog_dist.rpc.transport import Access

EVENTS_PER_TURN = 64  # then other things have their turn
Sink = Callable[[Event], None]  # hears the events of a request; a Done or an Error is the last one


class Line:
    """It belongs to one run of an engine: once lost, it is closed and of no use any more."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], access: Access, *, on_event: Sink, on_lost: Callable[[Line, str], None]
    ) -> None:
        """Begin to connect. `on_event` hears what belongs to no request. Raises LaunchError and EngineBusy like `open_link`."""
        self.access = access
        self.is_lost = False
        self.used_s = time.monotonic()  # when there was last something to do
        self.tokens_s = -math.inf  # when there were last tokens
        self._sinks: dict[str, Sink] = {}
        self._heard_s: dict[str, float] = {}
        self._on_event, self._on_lost = on_event, on_lost
        self._loop = asyncio.get_running_loop()
        self._link = open_link(context, access, self.read)

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def is_connected(self) -> bool:
        """Whether the engine has taken the connection."""
        return self._link.is_connected

    @property
    def engine(self) -> str:
        """Which run of an engine it leads to: another run has another name."""
        return self._link.engine

    @property
    def absence(self) -> str:
        """One sentence on an engine that has not taken the connection for a while."""
        return self._link.absence

    @property
    def closed(self) -> bool:
        """Whether `close` was called, or the engine was lost."""
        return self._link.closed

    # ---- requests ----
    def generate(self, message: Generate, sink: Sink) -> None:
        """Send a request; its sink hears of it from now on, at the earliest in the next turn of the event loop."""
        self._sinks[message.request_id] = sink
        self._heard_s[message.request_id] = self.used_s = time.monotonic()
        try:
            self.send(message)
        except (BadMessage, LaunchError) as error:
            code = ErrorCode.INVALID_REQUEST if isinstance(error, BadMessage) else ErrorCode.ENGINE_LOST
            event = error_event(code, str(error), message.request_id)
            self._loop.call_soon(self._deliver, message.request_id, event)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the rest of it: the engine is told. The sink hears how it ended."""
        if request_id in self._sinks:
            with contextlib.suppress(LaunchError):  # an engine that takes nothing is about to be lost
                self.send(Cancel(request_id))

    def send(self, message: Request) -> None:
        """Send a message. Raises LaunchError if the engine does not take any."""
        self._link.send(encode(message))

    def silent_since(self, limit_s: float) -> list[str]:
        """Requests of which nothing was heard for so long; the engine speaks of each four times a second."""
        latest_s = time.monotonic() - limit_s
        return [request_id for request_id, heard_s in self._heard_s.items() if heard_s < latest_s]

    def fail(self, request_id: str, code: ErrorCode, message: str) -> None:
        """End a request here with an error; the engine is told that nobody wants it any more."""
        self.cancel(request_id)
        self._deliver(request_id, error_event(code, message, request_id))

    # ---- events ----
    def read(self) -> None:
        """Take what has come, or come again at once when that is much."""
        link = self._link
        for _ in range(EVENTS_PER_TURN):
            if link.closed:
                return
            try:
                frame = link.receive()
            except LinkLost as lost:
                self.lose(f"the engine at {self.access.address} {lost}")
                return
            if frame is None:
                return
            try:
                event = decode_event(frame)
            except BadMessage as error:
                self.lose(f"the engine at {self.access.address} does not follow the protocol: {error}")
                return
            request_id = getattr(event, "request_id", None)
            if request_id is None:
                self._on_event(event)
            else:
                self._deliver(request_id, event)
        self._loop.call_soon(self.read)

    def _deliver(self, request_id: str, event: Event) -> None:
        sink = self._sinks.get(request_id)
        if sink is None:
            return  # what was under way when it was cancelled
        self.used_s = now_s = time.monotonic()
        if type(event) is Tokens:
            self._heard_s[request_id] = self.tokens_s = now_s
        elif isinstance(event, Done | Error):
            if isinstance(event, Error) and event.code is ErrorCode.UNKNOWN_REQUEST:
                return  # it had ended when it was cancelled; how, was told before
            del self._sinks[request_id], self._heard_s[request_id]
        else:
            self._heard_s[request_id] = now_s
        sink(event)

    def lose(self, reason: str) -> None:
        """The engine is gone: every request ends with one error, and the line is closed."""
        if self.is_lost:
            return
        self.is_lost = True
        sinks = list(self._sinks.items())
        self.close()
        for request_id, sink in sinks:
            sink(error_event(ErrorCode.ENGINE_LOST, f"{reason}; repeat the request when it is back", request_id))
        self._on_lost(self, reason)

    def close(self) -> None:
        """Close it; sinks hear nothing more. A second call does nothing."""
        self._link.close()
        self._sinks.clear()
        self._heard_s.clear()
