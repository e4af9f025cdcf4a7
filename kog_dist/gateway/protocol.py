"""HTTP/1.1 on a connection, by uvicorn and h11, with what they leave open: time limits for heads and for readers, a bound on
connections whose refusal has a body that their clients read, and bodies with two ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kog_dist.gateway.errors import error_body
from kog_dist.gateway.limits import LIMITS, Limits
from kog_dist.gateway.openai.errors import INVALID_REQUEST, SERVER, ApiError

_UNREAD_EVERY_S = 0.02
_PATH = re.compile(rb"[A-Za-z]+ (/[!-\x3e\x40-~]*)")  # of a request line, up to a query
_END_OF_HEAD = re.compile(rb"\n\r?\n")  # as h11 has it


class BoundedConnection(h11.Connection):
    """h11, which refuses a body of two lengths, and one of many small chunks.

    It takes 6 us for each chunk, and there may be 43,000 in what is read at once.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._limits = limits
        self._num_chunks = self._num_bytes = 0

    def next_event(self) -> Any:
        """See h11. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > self._limits.small_chunks + self._num_bytes // self._limits.chunk_bytes:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        elif isinstance(event, h11.Request):
            self._num_chunks = self._num_bytes = 0
            _check_framing(event)
        return event


def _check_framing(request: h11.Request) -> None:
    """Raise RemoteProtocolError where a proxy may see another end of the body than h11 does.

    What follows that end would be a request of whoever comes next on the proxy's connection (RFC 9112, 6.1 and 6.3).
    """
    names = {name for name, _ in request.headers}
    if b"transfer-encoding" in names and (b"content-length" in names or request.http_version != b"1.1"):
        raise h11.RemoteProtocolError("the request says in two ways where its body ends")


class BoundedHttp(H11Protocol):
    """One connection. Its limits, and what it calls before a request is parsed and after a refusal, come from `bounded`."""

    limits: Limits = LIMITS
    before_work: Callable[[], None] = staticmethod(lambda: None)
    on_refusal: Callable[[int], None] = staticmethod(lambda _status: None)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = BoundedConnection(self.limits)
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._path = ""  # of the newest request, which may be none
        self._unread_bytes = -1  # that came after a refusal; -1: none was sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, or say that there are too many."""
        if len(self.connections) >= self.limits.connections:
            error = ApiError(
                503, SERVER, "too_many_connections", None, "this service has as many connections as it takes; try later"
            )
            transport.write(plain_response(error, b"Service Unavailable", "", retry_after_s=1))
            transport.close()
            self.on_refusal(error.status)
            self.transport = transport
            return
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.limits.head_s, self._cut)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits for this client is told."""
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = None
        self._unset_keepalive_if_required()  # else it holds this object until it is over
        if self.flow is not None:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request. A head that has begun must be complete in time."""
        if self.flow is None or self.transport.is_closing():
            return
        if self._unread_bytes >= 0:
            self._take_unread(len(data))
            return
        self.before_work()
        if self.conn.their_state is h11.IDLE:
            head = self.conn.trailing_data[0] + data
            found = _PATH.match(head)
            self._path = "" if found is None else found[1].decode("ascii")
            if self._is_long(head):
                self.send_400_response("")
                return
        super().data_received(data)
        in_head = self.conn.their_state is h11.IDLE
        if not in_head and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        elif in_head and self._head_timer is None and self.conn.trailing_data[0]:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._cut)

    def _take_unread(self, num_bytes: int) -> None:
        """Forget what came after a refusal, a piece at a time: a client that pours it out holds up nobody."""
        self._unread_bytes += num_bytes
        if self._unread_bytes > self.limits.unread_bytes:
            self._cut()
            return
        self.transport.pause_reading()
        self.loop.call_later(_UNREAD_EVERY_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _is_long(self, head: bytes) -> bool:
        """Whether the head of these bytes is longer than it may be; h11 looks only at the length of incomplete ones."""
        most = self.limits.head_bytes
        end = _END_OF_HEAD.search(head, 0, most)
        if end is None and len(head) > most:
            return True
        return head.count(b"\n", 0, most if end is None else end.end()) > self.limits.head_lines

    def handle_events(self) -> None:
        """Give each request the short way for the chunks of its answer, and an end that a client which still sends can read."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.cycle is not None:
            self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
            self.cycle.scope["kog.write_chunk"] = functools.partial(self._write_chunk, self.cycle)  # type: ignore[typeddict-unknown-key]

    def _write_chunk(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Write part of a chunked response at once, as h11 would; False if it must go the long way.

        Every token takes this way: to wake a task for it, and to pass it through what is wrapped around `send`, takes longer than
        everything else that the gateway does for it.
        """
        is_ready = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        is_chunked = cycle.scope["http_version"] == "1.1" and cycle.scope["method"] != "HEAD"
        if not is_ready or not is_chunked or self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def pause_writing(self) -> None:
        """The client does not read, and the transport's buffer is full."""
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(self.limits.stall_s, self._cut)

    def resume_writing(self) -> None:
        """It has read."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all gets an error, too, as its path has it."""
        error = ApiError(400, INVALID_REQUEST, "bad_http", None, "this is not an HTTP/1.1 request that can be read")
        self.on_refusal(error.status)
        self.transport.write(plain_response(error, b"Bad Request", self._path))
        self._end_unread()

    def end_answer(self) -> None:
        """Close behind an answer."""
        if self.conn.their_state is h11.SEND_BODY:
            self._end_unread()
        else:
            self.transport.close()

    def _end_unread(self) -> None:
        """Close after an answer that came before the end of the request.

        What the client still sends is taken for a moment: to close a socket with bytes that nobody has read resets the
        connection, and the client would lose the answer.
        """
        if self._unread_bytes >= 0:
            return
        self._unread_bytes = 0
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has read the answer and is gone
                self.transport.write_eof()
        for timer in (self._head_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer, self._stall_timer = None, self.loop.call_later(self.limits.unread_s, self._cut)
        if self.cycle is not None:  # nobody waits for the rest of its body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """There are no websockets here."""
        self.send_400_response("")

    def _cut(self) -> None:
        """Nothing more is sent: the client does not read, or has nothing to say."""
        self._head_timer = self._stall_timer = None
        self.transport.abort()


class _AnswerTransport:
    """What uvicorn does with a connection when it answers."""

    def __init__(self, protocol: BoundedHttp) -> None:
        self._protocol = protocol
        self.write = protocol.transport.write
        self.is_closing = protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.end_answer()


def bounded(limits: Limits, before_work: Callable[[], None], on_refusal: Callable[[int], None]) -> type[BoundedHttp]:
    """The protocol with these bounds. `on_refusal` hears the status of what was refused before a request could be read."""
    calls = {"before_work": staticmethod(before_work), "on_refusal": staticmethod(on_refusal)}
    return type("BoundedHttp", (BoundedHttp,), {"limits": limits, **calls})


def plain_response(error: ApiError, phrase: bytes, path: str, retry_after_s: int | None = None) -> bytes:
    """A whole HTTP response that closes the connection."""
    body = error_body(error, path)
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % (
        error.status,
        phrase,
        len(body),
    )
    if retry_after_s is not None:
        head += b"retry-after: %d\r\n" % retry_after_s
    return head + b"\r\n" + body
