"""The counter of responses: each one once, whoever gave it."""

from __future__ import annotations

import functools
import re
import socket
from collections.abc import Sized

import httpx

from tests.unit.gateway.scripted_engine import WAIT_S, RunningGateway, ScriptedEngine, says, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


def responses(http: httpx.Client) -> dict[tuple[str, str], int]:
    """The counter of responses, by handler and status."""
    lines = re.findall(r'kog:http_responses_total{handler="([^"]+)",status="(\d+)"} (\d+)', http.get("/metrics").text)
    return {(handler, status): int(count) for handler, status, count in lines}


def test_every_response_is_counted_once(http: httpx.Client, engine: ScriptedEngine) -> None:
    before = responses(http)
    engine.on_generate = says("a")
    preflight = {"origin": "http://localhost:1", "access-control-request-method": "POST"}
    for method, path, body, headers in (
        ("POST", "/v1/completions", {"prompt": "x"}, {}),
        ("POST", "/v1/completions", {"prompt": "x", "stream": True}, {}),
        ("POST", "/v1/completions", {"prompt": 1.5}, {}),
        ("GET", "/v1/completions", None, {}),
        ("GET", "/made/up", None, {}),
        ("GET", "/static/none.js", None, {}),
        ("GET", "/v1/models/none", None, {}),
        ("GET", "/livez", None, {"host": "evil.example"}),
        ("OPTIONS", "/v1/completions", None, preflight),
    ):
        http.request(method, path, json=body, headers=headers)
    found = {key: count - before.get(key, 0) for key, count in responses(http).items() if count > before.get(key, 0)}
    assert found.pop(("/metrics", "200")) == 1
    assert found == {
        ("/v1/completions", "200"): 2, ("/v1/completions", "400"): 1, ("/v1/completions", "405"): 1, ("other", "404"): 1,
        ("/static/{name}", "404"): 1, ("/v1/models/{name}", "404"): 1, ("/livez", "403"): 1, ("/v1/completions", "403"): 1,
    }  # fmt: skip


def has(things: Sized, count: int) -> bool:
    return len(things) == count


def test_a_vanished_client_is_no_mistake_of_ours(http: httpx.Client, running: RunningGateway, engine: ScriptedEngine) -> None:
    before = responses(http)
    for count, stream in enumerate((b"false", b"true"), 1):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
            body = b'{"prompt": "x", "stream": %b}' % stream
            connection.sendall(HEAD % len(body) + body)
            until(functools.partial(has, engine.received, count))
        until(functools.partial(has, engine.cancelled, count))
    after = responses(http)
    assert {key: count for key, count in after.items() if count != before.get(key, 0)}.keys() == {("/metrics", "200")}


def test_what_is_no_request_is_counted_too(http: httpx.Client, running: RunningGateway) -> None:
    before = responses(http).get(("unread", "400"), 0)
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    assert responses(http)[("unread", "400")] == before + 1
