"""The client of `kog-bench serve`: asyncio connections that note when bytes came, and leave their meaning for later.

Between the reception of bytes and their moment there is nothing but the event loop; JSON is read when the run is over. What the
client costs all the same is measured: `SentRequest.busy_ns` is the time spent on what was received.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import field
from typing import Final

from kog_dist.chat.wire import EventParser, ResponseParser, ServiceUrl, request_bytes
from kog_dist.errors import LaunchError, ProtocolError
from kog_dist.records import dataclass

CONNECT_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 1.0
MAX_PLAIN_BYTES: Final = 1 << 20  # of an answer that is no event stream


@dataclass(slots=True)
class SentRequest:
    """A request and what came back. Moments are nanoseconds of CLOCK_MONOTONIC; `stamps_ns` has one for each payload."""

    wanted_ns: int = 0  # when it was to be sent
    sent_ns: int = 0  # when it was taken up: a connection that has to be made first counts
    ended_ns: int = 0
    stamps_ns: list[int] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    plain: bytes = b""  # a body that is no event stream
    busy_ns: int = 0
    error: str = ""  # why the connection did not bring an answer
    response: ResponseParser = field(default_factory=ResponseParser)


class _Connection(asyncio.Protocol):
    """One connection, with one exchange at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._exchange: SentRequest | None = None
        self._events = EventParser()
        self._ended: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()

    @property
    def is_lost(self) -> bool:
        """Whether its socket is closed."""
        return self._lost.is_set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    async def run(self, request: bytes, exchange: SentRequest) -> None:
        """Send a request; returns when its answer is complete or the connection is lost."""
        assert self._transport is not None, "the connection was made"
        self._exchange, self._events, self._ended = exchange, EventParser(), asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._ended
        finally:
            self._exchange = None
            if not exchange.response.is_complete or not exchange.response.may_reuse:
                self.close()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        try:
            body = exchange.response.feed(data)
            if body and exchange.response.fields.get("content-type", "").startswith("text/event-stream"):
                for payload in self._events.feed(body):
                    exchange.payloads.append(payload)
                    exchange.stamps_ns.append(now_ns)
            elif len(exchange.plain) < MAX_PLAIN_BYTES:
                exchange.plain += body
        except ProtocolError as error:
            exchange.error = str(error)
            self._end(exchange)
        if exchange.response.is_complete:
            self._end(exchange)
        exchange.busy_ns += time.monotonic_ns() - now_ns

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._lost.set()
        exchange = self._exchange
        if exchange is None:
            return
        try:
            if exc is not None:
                raise ProtocolError(f"the connection was lost: {exc}")
            exchange.response.end_of_connection()
        except ProtocolError as error:
            exchange.error = exchange.error or str(error)
        self._end(exchange)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.close()

    async def wait_closed(self) -> None:
        """Close, and return when the socket is closed, too; at once if the other end does not read what was written."""
        self.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._lost.wait()
        except TimeoutError:
            assert self._transport is not None, "it was open"
            self._transport.abort()

    def _end(self, exchange: SentRequest) -> None:
        exchange.ended_ns = time.monotonic_ns()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class LoadClient:
    """Requests to one service over connections that are kept."""

    def __init__(self, url: ServiceUrl, api_key: str = "") -> None:
        self.url = url
        self._api_key = api_key
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._tls = ssl.create_default_context() if url.is_tls else None

    async def get(self, path: str, timeout_s: float) -> SentRequest:
        """A GET. Raises LaunchError if nobody answers at all."""
        return await self._ask(request_bytes(self.url, "GET", path, api_key=self._api_key), timeout_s, must_connect=True)

    async def post(self, path: str, body: Mapping[str, object], timeout_s: float) -> SentRequest:
        """A POST of JSON. Whatever goes wrong is in the exchange."""
        return await self._ask(request_bytes(self.url, "POST", path, body=body, api_key=self._api_key), timeout_s)

    async def _ask(self, request: bytes, timeout_s: float, *, must_connect: bool = False) -> SentRequest:
        began_ns = time.monotonic_ns()
        while True:
            exchange, connection, is_fresh = SentRequest(wanted_ns=began_ns, sent_ns=began_ns), None, False
            try:
                async with asyncio.timeout(timeout_s):
                    connection, is_fresh = await self._connection()
                    await connection.run(request, exchange)
            except TimeoutError:
                exchange.error = f"no complete answer within {timeout_s:g} s"
            except OSError as error:
                reason = error.strerror or str(error) or type(error).__name__
                exchange.error = f"cannot connect to {self.url}: {reason}"
                if must_connect:
                    raise LaunchError(f"{exchange.error}; start a service there or give another --url") from None
            if connection is not None and connection.is_open:
                self._idle.append(connection)
            elif exchange.error and connection is not None and not is_fresh and not exchange.response.status:
                continue  # the service had closed a connection that was idle; another one is made
            return exchange

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if self.url.socket:
                _, connection = await loop.create_unix_connection(_Connection, self.url.socket)
            else:
                _, connection = await loop.create_connection(_Connection, self.url.host, self.url.port, ssl=self._tls)
        self._all = {other for other in self._all if not other.is_lost} | {connection}
        return connection, True

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._all:
            await connection.wait_closed()
