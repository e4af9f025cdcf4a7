"""HTTP and event streams from bytes, however they are cut into pieces."""

from __future__ import annotations

import random

import pytest

from kog_dist.chat import wire
from kog_dist.chat.wire import MAX_HEAD_BYTES, EventParser, ResponseParser, ServiceUrl, error_text, request_bytes
from kog_dist.errors import ConfigError, ProtocolError

BODY = b"data: one\n\ndata: two\n\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"b\r\ndata: one\n\n\r\n4;ext=1\r\ndata\r\n7\r\n: two\n\n\r\n0\r\nTrailer: x\r\n\r\n"
)
SIZED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
UNTIL_CLOSED = b"HTTP/1.0 200 OK\r\n\r\n" + BODY


def cut(raw: bytes, seed: int) -> list[bytes]:
    source, pieces = random.Random(seed), []
    while raw:
        size = source.randint(1, 9)
        pieces.append(raw[:size])
        raw = raw[size:]
    return pieces


@pytest.mark.parametrize("raw", [CHUNKED, SIZED, UNTIL_CLOSED, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED])
@pytest.mark.parametrize("seed", range(20))
def test_a_response_is_the_same_however_it_arrives(raw: bytes, seed: int) -> None:
    parser, body = ResponseParser(), b""
    for piece in cut(raw, seed):
        body += parser.feed(piece)
    assert parser.is_complete == (raw is not UNTIL_CLOSED)
    parser.end_of_connection()
    assert (parser.status, body, parser.is_complete) == (200, BODY, True)
    assert parser.may_reuse == (raw is not UNTIL_CLOSED)


@pytest.mark.parametrize("seed", range(5))
def test_of_comments_only_those_of_our_own_service_are_read(seed: int) -> None:
    events, payloads = EventParser(), list[bytes]()
    ours = b": 2 before this one\r\n\r\n: 64 of 900 prompt tokens\n\n"
    others = b": keep-alive\n\n: 7 before this one or that\n\n: 65 of 900 prompt tokens, or so\n\n"
    for piece in cut(ours + others + b"data: x\n\n", seed):
        payloads += events.feed(piece)
    assert (events.num_before, events.prompt_read, payloads) == (2, (64, 900), [b"x"])


@pytest.mark.parametrize("raw", [CHUNKED, SIZED])
def test_a_response_that_is_cut_off_is_an_error(raw: bytes) -> None:
    for length in range(len(raw)):
        parser = ResponseParser()
        parser.feed(raw[:length])
        with pytest.raises(ProtocolError, match="closed the connection"):
            parser.end_of_connection()


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n", b"HTTP/2 200\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"x" * (MAX_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
    ],
)  # fmt: skip
def test_what_is_no_http_is_an_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseParser().feed(raw)


def test_hostile_bytes_raise_nothing_else() -> None:
    source = random.Random(1)
    for _ in range(2000):
        raw = bytearray(CHUNKED)
        for _ in range(source.randint(1, 6)):
            raw[source.randrange(len(raw))] = source.randrange(256)
        parser = ResponseParser()
        try:
            for piece in cut(bytes(raw), source.randrange(1000)):
                parser.feed(piece)
            parser.end_of_connection()
        except ProtocolError:
            pass


@pytest.mark.parametrize("seed", range(10))
def test_events_are_the_same_however_they_arrive(seed: int) -> None:
    raw = b": comment\n\nevent: x\r\ndata:a\r\ndata: b\r\n\r\nid: 4\n\ndata: [DONE]\n\ndata: unfinished"
    parser, payloads = EventParser(), []
    for piece in cut(raw, seed):
        payloads += parser.feed(piece)
    assert payloads == [b"a\nb", b"[DONE]"]


@pytest.mark.parametrize(
    ("text", "shown", "prefix"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", "/v1"), ("http://h/v1/", "http://h:80", "/v1"),
        ("https://h/api/v1", "https://h:443/api", "/api/v1"), ("http://[::1]:9/x", "http://[::1]:9/x", "/x/v1"),
    ],
)  # fmt: skip
def test_urls(text: str, shown: str, prefix: str) -> None:
    url = ServiceUrl.parse(text)
    assert (str(url), url.prefix) == (shown, prefix)


@pytest.mark.parametrize(
    "text", ["", "http://", "ftp://h", "http://h:99999", "http://h?x=1", "http://user@h", "http://h/a b", "http://h/ü"]
)
def test_what_is_no_url_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="URL"):
        ServiceUrl.parse(text)


def test_a_request_is_complete_and_a_key_cannot_smuggle_fields() -> None:
    url = ServiceUrl.parse("http://h:8000")
    raw = request_bytes(url, "POST", "/v1/completions", body={"prompt": "ü"}, api_key="k")
    head, _, body = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:8000\r\n")
    assert b"Authorization: Bearer k" in head
    assert b"Content-Length: %d" % len(body) in head
    with pytest.raises(ConfigError, match="API key"):
        request_bytes(url, "GET", "/", api_key="k\r\nX-Evil: 1")


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'{"error": {"message": "no\\n room"}}', "HTTP 429: no room"), (b'{"detail": 1}', "HTTP 429: {'detail': 1}"),
        (b'{"error": "full"}', "HTTP 429: full"), (b"", "HTTP 429"), (b"<html>", "HTTP 429: <html>"),
        (b"\xff", "HTTP 429: \ufffd"),
    ],
)  # fmt: skip
def test_error_texts(body: bytes, shown: str) -> None:
    assert error_text(429, body) == shown


def test_a_line_may_be_as_long_as_the_limit_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_LINE_BYTES", 10)
    parser = EventParser()
    assert parser.feed(b"data: 1234") == []
    assert parser.feed(b"\n\n") == [b"1234"]
    with pytest.raises(ProtocolError, match="more than 10 bytes without a line end"):
        parser.feed(b"data: 12345")
