"""The same hostile dialogues over the paths of all protocols: each client reads an error of its own protocol's form.

`make service` has 500 such clients at once (tests/e2e/hostile_clients.py).
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from kog_dist.gateway import body_work
from kog_dist.gateway.body_work import PLANS, TOKENS
from kog_dist.gateway.limits import LIMITS, MAX_BODY_BYTES, Limits
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.protocols import protocol_of
from kog_dist.rpc.messages import ErrorCode
from tests.unit.gateway.scripted_engine import WAIT_S, RunningGateway, ScriptedEngine, gateway, says, until
from tests.unit.gateway_openai.conftest import base_model

__all__ = ["base_model"]
PATHS: Final = (*PLANS, *TOKENS)
USER: Final = [{"role": "user", "content": "x"}]
STREAMS: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": USER, "stream": True},
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/responses": {"input": "x", "stream": True},
    "/v1/messages": {"model": "demo", "max_tokens": 9, "messages": USER, "stream": True},
    "/api/chat": {"model": "demo", "messages": USER},
    "/api/generate": {"model": "demo", "prompt": "x"},
}
JSON: Final = "content-type: application/json"
BOTH_LENGTHS: Final = "content-length: 2\r\ntransfer-encoding: chunked"

# What is said behind the request line, with `host` before it, and the status. Headers that a body needs are added to it.
DIALOGUES: Final[dict[str, tuple[str, bytes, int]]] = {
    "no JSON": (JSON, b"{", 400),
    "nothing": (JSON, b"", 400),
    "an array": (JSON, b"[]", 400),
    "null": (JSON, b"null", 400),
    "a text": (JSON, b'"x"', 400),
    "a long number": (JSON, b"9" * 10_000, 400),
    "no UTF-8": (JSON, b'{"model": "\xff\xfe"}', 400),
    "UTF-16": (JSON, '{"model": "demo"}'.encode("utf-16"), 400),
    "half a character": (JSON, b'{"model": "\\ud800"}', 400),
    "NaN": (JSON, b'{"a": NaN}', 400),
    "Infinity": (JSON, b'{"a": -Infinity}', 400),
    "a key twice": (JSON, b'{"model": "demo", "model": "demo"}', 400),
    "deep lists": (JSON, b'{"model":' + b"[" * 60_000 + b"]" * 60_000 + b"}", 400),
    "deep objects": (JSON, b'{"a":' * 1000 + b"1" + b"}" * 1000, 400),
    "many fields": (JSON, json.dumps({f"f{idx}": 0 for idx in range(257)}).encode(), 400),
    "many lists": (JSON, b'{"model":[' + b"[]," * 70_000 + b"[]]}", 400),
    "too many bytes": (f"{JSON}\r\ncontent-length: {MAX_BODY_BYTES + 1}", b"", 413),
    "little that becomes much": (f"{JSON}\r\ncontent-encoding: gzip", gzip.compress(bytes(MAX_BODY_BYTES + 1)), 413),
    "no gzip": (f"{JSON}\r\ncontent-encoding: gzip", b"{}", 400),
    "another encoding": (f"{JSON}\r\ncontent-encoding: br", b"{}", 415),
    "small chunks": (f"{JSON}\r\ntransfer-encoding: chunked", b"1\r\nx\r\n" * (LIMITS.small_chunks + 10), 400),
    "no chunks": (f"{JSON}\r\ntransfer-encoding: chunked", b"nonsense\r\n", 400),
    "two ends": (f"{JSON}\r\n{BOTH_LENGTHS}", b"0\r\n\r\n", 400),
    "two lengths": ("content-length: 4\r\ncontent-length: 5", b"", 400),
    "a long head": (f"x: {'a' * LIMITS.head_bytes}", b"", 400),
    "many lines": ("a: b\r\n" * LIMITS.head_lines + "a: b", b"", 400),
    "no header": ("a\x00b", b"", 400),
    "another type": ("content-type: text/html", b"{", 415),
    "a foreign page": (f"{JSON}\r\norigin: https://evil.example", b"{}", 403),
    "a page of no origin": (f"{JSON}\r\norigin: null", b"{}", 403),
    "a foreign form": ("content-type: text/plain\r\nsec-fetch-site: cross-site", b"{}", 403),
    "a page of another port": ("content-type: text/plain\r\nsec-fetch-site: same-site", b"{}", 403),
}


def said_to(port: int, path: str, head: str, body: bytes, method: str = "POST", host: str = "localhost") -> bytes:
    """All that is answered to a request that may be none."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}", "connection: close", head]
    if "content-length" not in head and "transfer-encoding" not in head:
        lines.append(f"content-length: {len(body)}")
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        return rest_of(connection)


def rest_of(connection: socket.socket) -> bytes:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            answer += chunk
    return answer


def refused(answer: bytes, path: str, status: int, what: str = "") -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), (what, answer[:300])
    assert b"content-type: application/json" in head
    check_form(json.loads(body), path)


def check_form(body: Any, path: str) -> None:
    """Whether an error is what clients of this path know how to read."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        message = body["error"]
    elif path.startswith("/v1/messages"):
        assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
        message = body["error"]["message"]
    else:
        assert (set(body), set(body["error"])) == ({"error"}, {"message", "type", "param", "code"})
        message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert "Traceback" not in message


@pytest.mark.parametrize("path", PATHS)
def test_what_cannot_be_read_is_refused_in_the_form_of_the_path(
    running: RunningGateway, http: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    for what, (head, body, status) in DIALOGUES.items():
        is_read_anyhow = what == "another type" and path.startswith("/api/")  # as Ollama does
        refused(said_to(running.port, path, head, body), path, 400 if is_read_anyhow else status, what)
    refused(said_to(running.port, path, JSON, b"{}", method="PUT"), path, 405)
    refused(said_to(running.port, path, JSON, b"{}", host="evil.example"), path, 403)
    refused(said_to(running.port, f"{path}/x", JSON, b"{}"), path, 404)
    assert running.service.bodies_bytes == 0
    assert not engine.received, "nothing of that may reach the engine"
    assert http.get("/livez").status_code == 200


@pytest.mark.parametrize("path", PATHS)
def test_the_document_says_which_form(running: RunningGateway, http: httpx.Client, path: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    document = http.get("/openapi.json").json()
    schema = {"$ref": f"#/paths/{path.replace('/', '~1')}/post/responses/400/content/application~1json/schema", **document}
    jsonschema.validate(http.post(path, content=b"{").json(), schema)
    for other in {"/v1/completions", "/v1/messages", "/api/chat"} - {path}:
        body = http.post(other, content=b"{").json()
        is_ours = protocol_of(other) is protocol_of(path)
        assert jsonschema.Draft202012Validator(schema).is_valid(body) is is_ours, other


WRONG: Final[tuple[Any, ...]] = (True, 7, -1.5, "x", [], [[]], [None], {}, {"type": "x"}, [{"role": "x"}], [{"content": {}}])
FIELDS: Final = ("tools", "temperature", "options", "format", "think", "thinking", "system", "tool_choice", "stop", "suffix")


@pytest.mark.parametrize("path", STREAMS)
def test_fields_of_a_wrong_type_are_no_mistake_of_ours(base_model: ServedModel, path: str) -> None:
    for name in (*STREAMS[path], *FIELDS):
        for value in WRONG:
            with contextlib.suppress(ApiError):  # the only error that there may be
                body_work.read(path, json.dumps({**STREAMS[path], name: value}).encode(), base_model)


@pytest.fixture(scope="module")
def impatient(shared_engine: ScriptedEngine, folder: Path) -> Iterator[RunningGateway]:
    limits = Limits(body_s=0.1, head_s=0.1, bodies_bytes=100_000, connections=40)
    with gateway(shared_engine, folder, limits=limits, keys=["s3cret-s3cret"]) as made:
        yield made


KEY: Final = f"{JSON}\r\nx-api-key: s3cret-s3cret"


def test_slow_and_large_bodies_and_missing_keys(impatient: RunningGateway, engine: ScriptedEngine) -> None:
    """All paths at a time, so that the limits are waited for once."""
    half_heads = [socket.create_connection(("127.0.0.1", impatient.port), timeout=WAIT_S) for _ in PATHS]
    for path, connection in zip(PATHS, half_heads, strict=True):
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: loc".encode())
    slow = {path: socket.create_connection(("127.0.0.1", impatient.port), timeout=WAIT_S) for path in PATHS}
    for path, connection in slow.items():
        connection.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{KEY}\r\ncontent-length: 9\r\n\r\n{{".encode())
    for path, connection in slow.items():
        with connection:
            refused(rest_of(connection), path, 408)
        refused(said_to(impatient.port, path, KEY, b" " * 200_000), path, 503)
        refused(said_to(impatient.port, path, JSON, b"{}"), path, 401)
    for connection in half_heads:
        with connection:
            assert rest_of(connection) == b""
    until(lambda: not impatient.server.server_state.connections)
    assert impatient.service.bodies_bytes == 0
    assert not engine.received


def test_connections_beyond_the_bound(impatient: RunningGateway) -> None:
    """What they want is not read, so that the form is OpenAI's."""
    begun = [socket.create_connection(("127.0.0.1", impatient.port), timeout=WAIT_S) for _ in range(40)]
    refused(said_to(impatient.port, "/api/chat", KEY, b"{}"), "/v1/completions", 503)
    for idx, connection in enumerate(begun):
        with connection:
            connection.sendall(f"POST {PATHS[idx % len(PATHS)]} HTTP/1.1\r\nhost: loc".encode())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset instead of an end
    until(lambda: not impatient.server.server_state.connections)


@pytest.mark.parametrize("path", STREAMS)
def test_who_leaves_in_an_answer_cancels_it(running: RunningGateway, engine: ScriptedEngine, path: str) -> None:
    engine.on_generate = says("first", finish=None)
    body = json.dumps(STREAMS[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{JSON}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for idx, is_reset in enumerate((False, True)):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
            connection.sendall(head + body)
            answer = b""
            while b"first" not in answer:
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200 ")
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        engine.wait_cancelled(engine.next_request(idx).message.request_id)
    until(lambda: not running.service.answering)


@pytest.mark.parametrize("path", STREAMS)
def test_what_fails_is_told_in_the_form_of_the_path(http: httpx.Client, engine: ScriptedEngine, path: str) -> None:
    """Before the first token as a status, later as the last frame of the stream."""
    engine.on_generate = lambda received: received.fail(ErrorCode.QUEUE_FULL, "64 requests wait", 2.0)
    busy = http.post(path, json=STREAMS[path])
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "2")
    check_form(busy.json(), path)

    def fail_late(received: Any) -> None:
        says("first", finish=None)(received)
        received.fail(ErrorCode.RANK_FAILED, "rank 1 died")

    engine.on_generate = fail_late
    lines = [line for line in http.post(path, json=STREAMS[path]).text.splitlines() if "{" in line]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert "rank 1 died" in json.dumps(last)
    if path != "/v1/responses":  # whose last event is the whole response
        check_form(last, path)
