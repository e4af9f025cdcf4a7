"""A refusal that comes before the end of its request reaches a client that is still sending."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import cast

import pytest

from kog_dist.gateway.limits import LIMITS
from kog_dist.gateway.protocol import BoundedHttp, bounded
from tests.unit.gateway.scripted_engine import WAIT_S, RunningGateway

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer_to(port: int, request: bytes) -> bytes:
    """What a client reads that hands over all its bytes at once and does not wait until they are taken."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()


def test_a_body_of_small_chunks_gets_its_answer(running: RunningGateway) -> None:
    for _ in range(5):
        answer = asyncio.run(answer_to(running.port, HEAD + b"1\r\nx\r\n" * 500_000))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b'"bad_http"' in answer


@pytest.mark.parametrize("field", ["host: evil.example", "host: localhost\r\ncontent-type: text/html"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_who_sends_its_body_after_a_refusal_is_not_reset(running: RunningGateway, path: str, field: str) -> None:
    """A reset may take the answer with it that the client has not read yet."""
    if path == "/api/chat":
        field = field.replace("content-type: text/html", "origin: null")
    head = f"POST {path} HTTP/1.1\r\n{field}\r\ncontent-length: 4\r\n\r\n"
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode())
        answer = b""
        while chunk := connection.recv(1000):
            answer += chunk
        assert answer.startswith(b"HTTP/1.1 4")
        for _ in range(4):
            connection.sendall(b"{")
            assert connection.recv(1) == b""


def test_who_never_ends_is_cut(running: RunningGateway) -> None:
    begin_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(HEAD + b"1\r\nx\r\n" * 1000)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")
        try:
            while time.monotonic() - begin_s < WAIT_S:
                connection.sendall(b"1\r\nx\r\n")
        except OSError:
            return
    raise AssertionError("the connection was open for ever")


def test_who_is_gone_with_the_first_byte_of_the_answer_is_counted() -> None:
    """The system refuses to shut down a socket whose other end is closed."""
    counted: list[int] = []

    class Gone:
        def write(self, data: bytes) -> None:
            assert data.startswith(b"HTTP/1.1 400 ")

        def can_write_eof(self) -> bool:
            return True

        def write_eof(self) -> None:
            raise OSError(107, "Transport endpoint is not connected")

    class Loop:
        def call_later(self, delay_s: float, call: object) -> None:
            assert delay_s == LIMITS.unread_s

    protocol = object.__new__(bounded(LIMITS, lambda: None, counted.append))
    for name, value in {
        "transport": Gone(), "loop": Loop(), "cycle": None, "_path": "", "_unread_bytes": -1, "_head_timer": None,
        "_stall_timer": None,
    }.items():  # fmt: skip
        setattr(protocol, name, value)
    protocol.send_400_response("")
    assert counted == [400]


@pytest.mark.parametrize("is_closing", [True, False])
def test_a_connection_that_ends_is_read_no_more(is_closing: bool) -> None:
    """Where a transport that closes is told to read on, asyncio raises."""
    resumed: list[bool] = []
    connection = BoundedHttp.__new__(BoundedHttp)
    transport = SimpleNamespace(is_closing=lambda: is_closing, resume_reading=lambda: resumed.append(True))
    connection.transport = cast("asyncio.Transport", transport)
    connection._read_on()
    assert resumed == ([] if is_closing else [True])
