"""The way to the engine: asks how it is, and sends requests so that HTTP clients get the fairness that RPC clients have.

The engine lets connections take turns and bounds what waits of each. So every HTTP client that has requests has a connection to
itself as long as it has them, up to a number; beyond it clients share.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable
from typing import Final

import zmq

from kog_dist.errors import KogError, LaunchError
from kog_dist.gateway.line import Line, Sink
from kog_dist.gateway.logs import Log
from kog_dist.gateway.readiness import ASK_EVERY_S, ASK_FIRST_S, Readiness
from kog_dist.records import dataclass
from kog_dist.rpc.file_end import EngineBusy
from kog_dist.rpc.messages import Error, ErrorCode, Event, Generate, Hello, Status, StatusReport, Welcome, build_hash
from kog_dist.rpc.transport import Access

MAX_LINES: Final = 32
IDLE_LINE_S: Final = 10.0  # a connection without requests is kept for the client that had it
SILENCE_S: Final = 10.0  # of a request; the engine speaks of each about four times a second
STREAMING_S: Final = 0.1  # a connection that had tokens so recently will have more
UNANSWERED_S: Final = 1.0  # a connection that the engine has not taken for so long is made again
MISSED_S: Final = 3.0  # an engine that has not been found for so long since the start: the log says so
HELD_UP_S: Final = 4 * ASK_EVERY_S  # this process was not given the processor for so long


@dataclass(slots=True)
class Call:
    """Requests that belong together, on one connection. `cancel` ends those that have not ended."""

    line: Line | None  # None: they were refused at once
    request_ids: list[str]

    def cancel_one(self, request_id: str) -> None:
        """Nobody wants the rest of this answer. Its sink still hears how it ended."""
        if self.line is not None:
            self.line.cancel(request_id)

    def cancel(self) -> None:
        """Nobody wants the answers any more. Their sinks still hear how they ended."""
        if self.line is not None:
            for request_id in self.request_ids:
                self.line.cancel(request_id)
        self.request_ids.clear()


class EngineBridge:
    """One engine or router, seen from the gateway. Everything happens on the event loop's thread."""

    def __init__(
        self,
        find: Callable[[], Access],
        readiness: Readiness,
        log: Log,
        *,
        on_welcome: Callable[[Welcome], None],
        on_report: Callable[[StatusReport | None], None] = lambda _report: None,
    ) -> None:
        """`find` says where the engine is; it is asked again for every connection. Raises nothing; `run` does the work."""
        self.readiness = readiness
        self._log = log
        self._find, self._on_welcome, self._on_report = find, on_welcome, on_report
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control: Line | None = None
        self._control_s = 0.0
        self._lines: dict[Hashable, Line] = {}
        self._greeted = False
        self._doubt: str | None = None  # why new connections do not lead to the engine whose reports still come
        self._missed_s: float | None = None  # when to say that no engine was found; None: it was, or that was said

    async def run(self) -> None:
        """Keep a connection, ask for the state, look after silent requests; until cancelled."""
        self._missed_s = time.monotonic() + MISSED_S
        try:
            while True:
                self._tend()
                begin_s = time.monotonic()
                await asyncio.sleep(ASK_EVERY_S if self.readiness.has_served else ASK_FIRST_S)
                if time.monotonic() - begin_s > HELD_UP_S:
                    self.readiness.forgive()
        finally:
            self.close()

    def close(self) -> None:
        """Close all connections: the engine cancels what they had."""
        for line in [*self._lines.values(), *([self._control] if self._control is not None else [])]:
            line.close()
        self._lines.clear()
        self._control = None
        self._context.destroy(linger=0)

    # ---- requests ----
    def submit(self, client: Hashable, generates: tuple[Generate, ...], sinks: tuple[Sink, ...]) -> Call:
        """Send requests of an HTTP client; each sink hears the events of its request, the last of them a Done or an Error."""
        try:
            line = self._line_of(client)
        except EngineBusy as error:
            return self._refuse(generates, sinks, str(error))
        except KogError as error:
            self._doubt_engine(str(error))
            return self._refuse(generates, sinks, str(error))
        call = Call(line, [message.request_id for message in generates])
        for message, sink in zip(generates, sinks, strict=True):
            line.generate(message, sink)
        return call

    def deliver(self) -> None:
        """Hand out the tokens that have come. Whatever may take a while calls this first: when hundreds of clients are at it in
        one turn of the event loop, a token waits for one of them and not for all.
        """
        recent_s = time.monotonic() - STREAMING_S
        for line in [line for line in self._lines.values() if line.tokens_s > recent_s]:
            line.read()

    def _refuse(self, generates: tuple[Generate, ...], sinks: tuple[Sink, ...], reason: str) -> Call:
        loop = asyncio.get_running_loop()
        for message, sink in zip(generates, sinks, strict=True):
            loop.call_soon(sink, Error(ErrorCode.ENGINE_LOST, reason[:4096], message.request_id))
        return Call(None, [])

    def _line_of(self, client: Hashable) -> Line:
        line = self._lines.get(client)
        if line is not None:
            return line
        idle = next((key for key, line in self._lines.items() if not len(line)), None)
        if idle is not None:  # turns matter only to those who have requests, and a connection costs more than a request
            line = self._lines[client] = self._lines.pop(idle)
            return line
        if len(self._lines) >= MAX_LINES:
            return min(self._lines.values(), key=len)
        line = self._lines[client] = self._new_line()
        return line

    def _new_line(self) -> Line:
        """A new connection to the engine that reports. Raises KogError: none is there, or another one; EngineBusy."""
        line = Line(self._context, self._find(), on_event=self._take, on_lost=self._line_lost)
        if self._control is not None and line.engine != self._control.engine:
            line.close()
            raise LaunchError(
                f"another engine ({line.engine}) listens at {line.access.address} by now, not the one of this service "
                f"({self._control.engine})"
            )
        return line

    def _line_lost(self, lost: Line, reason: str) -> None:
        self._log.problem("connection_lost", reason)
        self._lines = {client: line for client, line in self._lines.items() if line is not lost}
        if self._control is not None:
            self._ask()  # whether the engine is gone, or only this connection

    # ---- the engine's state ----
    def _doubt_engine(self, reason: str) -> None:
        """Reports come through a connection that was made before; a request needs a new one, and there is none to be had."""
        if self._doubt is None:
            self._log.problem("engine_unreachable", reason)
        self._doubt = reason
        if self._control is not None:
            self.readiness.lost(reason)

    def _try_again(self) -> None:
        """Whether new connections lead to the engine again. The next report makes it ready then."""
        try:
            self._new_line().close()
        except EngineBusy:
            return
        except KogError as error:
            self._doubt_engine(str(error))
            return
        self._doubt = None

    def _tend(self) -> None:
        now_s = time.monotonic()
        for client, line in list(self._lines.items()):
            for request_id in line.silent_since(SILENCE_S):
                line.fail(
                    request_id, ErrorCode.ENGINE_LOST, f"the engine has said nothing about this request for {SILENCE_S:g} s"
                )
            if not len(line) and now_s - line.used_s > IDLE_LINE_S:
                self._lines.pop(client).close()
        if self._control is None:
            self._connect()
        elif not self._control.is_connected and now_s - self._control_s > UNANSWERED_S:
            self.readiness.lost(self._control.absence)
            self._control.close()  # it may have the keys of an engine that is gone
            self._control = None
        else:
            if self._doubt is not None:
                self._try_again()
            self._ask()
        if not self.readiness.health().serves:
            self._on_report(None)
        if self._missed_s is not None and (self.readiness.report is not None or now_s > self._missed_s):
            self._missed_s = None
            if self.readiness.report is None:
                self._log.problem("engine_missing", f"{self.readiness.health().reason}; /readyz says when that changes")

    def _connect(self) -> None:
        try:
            access = self._find()
            self._control = Line(self._context, access, on_event=self._take, on_lost=self._control_lost)
        except KogError as error:
            self.readiness.lost(str(error))
            return
        self._control_s, self._greeted, self._doubt = time.monotonic(), False, None
        with contextlib.suppress(LaunchError):
            self._control.send(Hello(build_hash()))
            self._control.send(Status())

    def _ask(self) -> None:
        if self._control is None or not self._control.is_connected:
            return
        self.readiness.asked()
        try:
            self._control.send(Status())
        except LaunchError as error:
            self.readiness.lost(str(error))

    def _control_lost(self, _line: Line, reason: str) -> None:
        self._control = None
        self.readiness.lost(f"{reason}; it is not back yet")
        self._log.problem("engine_lost", reason)
        self._on_report(None)
        for other in list(self._lines.values()):
            if not other.is_connected:
                other.lose(reason)

    def _take(self, event: Event) -> None:
        """What belongs to no request."""
        match event:
            case StatusReport():
                self.readiness.reported(event)
                if self._doubt is not None:
                    self.readiness.lost(self._doubt)
                self._on_report(event)
            case Welcome():
                self._on_welcome(event)
            case Error():
                self._log.problem("rpc_error", f"the engine does not understand this gateway: {event.message}")
                if event.code is ErrorCode.PROTOCOL_VERSION:
                    self.readiness.mismatch(event.message)
            case _:
                pass
