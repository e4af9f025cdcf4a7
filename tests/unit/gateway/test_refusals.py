"""Everything that is refused before the engine hears of it: each with OpenAI's error body and the right status."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import httpx
import pytest

from kog_dist.gateway.limits import MAX_BODY_BYTES
from tests.unit.gateway.scripted_engine import JSON, RunningGateway, ScriptedEngine, raw_request

POSTS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_anthropics_clients_get_errors_of_their_form(http: httpx.Client, path: str) -> None:
    for response, status, kind in (
        (http.post(path, content=b"{", headers=JSON), 400, "invalid_request_error"),
        (http.post(path, json={"model": "demo", "max_tokens": 1, "messages": []}), 400, "invalid_request_error"),
        (http.get(path), 405, "invalid_request_error"),
        (http.post(path, json={}, headers={"host": "evil.example"}), 403, "permission_error"),
    ):
        assert response.status_code == status
        assert set(response.json()) == {"type", "error"}
        assert response.json()["error"]["type"] == kind


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert "/openapi.json" in error_of(http.get("/v2/things"), 404)["message"]
    assert "/v1/completions" in error_of(http.get("/v1/completions"), 405)["message"]
    assert http.get("/v1/completions").headers["allow"] == "POST"
    assert "/livez" in error_of(http.post("/livez"), 405)["message"]
    assert "page.html" in error_of(http.get("/static/page.html"), 404)["message"]
    assert error_of(http.get("/static/..%2fapp.py"), 404)


@pytest.mark.parametrize("path", POSTS)
def test_bodies_that_are_no_json(http: httpx.Client, path: str) -> None:
    plain = http.post(path, content=b"{}", headers={"content-type": "text/plain"})
    assert "Content-Type: application/json" in error_of(plain, 415)["message"]
    undeclared = http.post("/v1/completions", content=b"{}")
    assert "content-type" not in undeclared.request.headers
    assert error_of(undeclared, 400)["param"] == "prompt", "it is read as JSON"
    assert "not valid JSON" in error_of(http.post(path, content=b"{", headers=JSON), 400)["message"]
    assert "NaN" in error_of(http.post(path, content=b'{"a": NaN}', headers=JSON), 400)["message"]
    assert "-Infinity" in error_of(http.post(path, content=b'{"a": -Infinity}', headers=JSON), 400)["message"]
    deep = b'{"prompt":' + b"[" * 60_000 + b"]" * 60_000 + b"}"
    assert "nests deeper" in error_of(http.post(path, content=deep, headers=JSON), 400)["message"]
    for body in (b"[]", b"null", b'"x"', b"\xff\xfe", b"9" * 10_000, b'{"a": 1e999}', b'{"model": "\\ud800"}', b""):
        error_of(http.post(path, content=body, headers=JSON), 400)


def test_a_body_is_counted_whatever_it_claims(running: RunningGateway, http: httpx.Client) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    claimed = raw_request(running.port, f"{head}content-length: {MAX_BODY_BYTES + 1}\r\n\r\n")
    assert claimed.startswith(b"HTTP/1.1 413 ")

    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 65536

    assert error_of(http.post("/v1/completions", content=chunks(), headers=JSON), 413)["code"] == "request_too_large"
    assert running.service.bodies_bytes == 0


def test_what_is_no_http_gets_an_error_too(running: RunningGateway) -> None:
    for head in (
        "nonsense\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: localhost\r\nx: \x00\r\n\r\n",
        "G" * 70_000,
    ):
        answer = raw_request(running.port, head)
        assert answer.startswith(b"HTTP/1.1 4"), answer[:100]
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])


CHUNKED, LENGTH = "transfer-encoding: chunked", "content-length: 4"


@pytest.mark.parametrize(
    ("version", "fields"),
    [
        ("1.1", (LENGTH, CHUNKED)),
        ("1.1", (CHUNKED, LENGTH)),
        ("1.1", ("Content-Length: 4", "Transfer-Encoding: Chunked")),
        ("1.1", (LENGTH, LENGTH, CHUNKED)),
        ("1.1", ("content-length: 0", CHUNKED)),
        ("1.1", ("content-length: 4, 4", CHUNKED)),
        ("1.1", (LENGTH, "content-length: 5")),
        ("1.1", (CHUNKED, CHUNKED)),
        ("1.1", ("transfer-encoding: identity", LENGTH)),
        ("1.1", ("transfer-encoding: gzip, chunked", LENGTH)),
        ("1.1", ("transfer-encoding : chunked", LENGTH)),
        ("1.1", ("content-length: +4",)),
        ("1.0", (CHUNKED, "connection: keep-alive")),
        ("1.0", (CHUNKED, LENGTH)),
    ],
)
def test_a_body_of_two_lengths_ends_its_connection(running: RunningGateway, version: str, fields: tuple[str, ...]) -> None:
    """What a proxy takes for the rest of it would be the next request."""
    head = "\r\n".join([f"POST /v1/completions HTTP/{version}", "host: localhost", *fields, "", ""])
    hidden = b"0\r\n\r\nGET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = raw_request(running.port, head, hidden)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"\r\n\r\n") == 1, "the connection is closed, and nothing behind it is answered"
    assert b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"


def test_a_head_is_bounded_however_it_comes(running: RunningGateway) -> None:
    for num_bytes, pieces, status in ((32_000, 1, 200), (32_000, 7, 200), (33_000, 1, 400), (33_000, 2, 400), (65_000, 1, 400)):
        head = "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: "
        raw = (head + "a" * (num_bytes - len(head) - 4) + "\r\n\r\n").encode()
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for begin in range(0, num_bytes, -(-num_bytes // pieces)):
                connection.sendall(raw[begin : begin + -(-num_bytes // pieces)])
                time.sleep(0.02 if pieces > 1 else 0)
            assert connection.recv(12) == b"HTTP/1.1 %d" % status, (num_bytes, pieces)


def test_a_long_body_that_comes_with_its_head_is_no_long_head(running: RunningGateway) -> None:
    body = b"{}" + b" " * 60_000
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    assert b"prompt is missing" in raw_request(running.port, f"{head}content-length: {len(body)}\r\n\r\n", body)


def test_websockets_are_refused(running: RunningGateway) -> None:
    head = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert b"websocket" not in raw_request(running.port, head).partition(b"\r\n\r\n")[0].lower()


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost:1", "[", "", "evil.example@localhost",
        "a:b@localhost", "@localhost", "localhost/evil", "localhost#evil", "localhost?evil", "localhost\\evil",
        "localhost evil",
        "localhost,evil.example", "localhost:80:80", "localhost:+80", "localhost: 80", "localhost:-1", "localhost:\u00b2",
        "localhost:99999999999", "[::1", "::1]", "[localhost]", "[::1%25lo]", "[::1]evil",
        "http://localhost", "//localhost", "%6cocalhost",
    ],
)  # fmt: skip
def test_other_hosts_are_refused_on_loopback(http: httpx.Client, host: str) -> None:
    assert error_of(http.get("/livez", headers={b"host": host.encode("latin-1")}), 403)["code"] == "forbidden_host"


def test_own_hosts_are_answered(running: RunningGateway, http: httpx.Client) -> None:
    for host in (
        "localhost",
        "LocalHost",
        "localhost:",
        f"localhost:{running.port}",
        f"127.0.0.1:{running.port}",
        f"[::1]:{running.port}",
    ):
        assert http.get("/livez", headers={"host": host}).status_code == 200, host


def test_pages_of_others_are_refused(running: RunningGateway, http: httpx.Client) -> None:
    own = (f"{running.url}0", f"{running.url}.evil.example", f"{running.url}/page", running.url.replace("//", "//evil@"))
    for origin in ("https://evil.example", "null", f"http://localhost:{running.port + 1}", *own):
        assert error_of(http.get("/livez", headers={"origin": origin}), 403)["code"] == "forbidden_origin"
        preflight = {"origin": origin, "access-control-request-method": "POST"}
        assert http.options("/v1/completions", headers=preflight).status_code == 403
    assert http.get("/livez", headers={"origin": running.url}).status_code == 200


@pytest.mark.parametrize("path", POSTS[:3])
def test_requests_that_the_model_cannot_serve(http: httpx.Client, engine: ScriptedEngine, path: str) -> None:
    field: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": {"prompt": "x"},
    }
    body = field.get(path, {"input": "x"})
    found = error_of(http.post(path, json={**body, "model": "gpt-9"}), 404)
    assert found["code"] == "model_not_found"
    assert "demo" in found["message"]
    assert "default" in found["message"]
    assert error_of(http.post(path, json={**body, "temperature": -1}), 400)["param"] == "temperature"
    assert error_of(http.post(path, json={**body, "temprature": 2}), 400)["param"] == "temprature"
    assert not engine.received, "nothing of that may reach the engine"


def test_limits_of_completions(http: httpx.Client, engine: ScriptedEngine) -> None:
    for wrong in (
        {"prompt": [4096]}, {"prompt": [-1]}, {"prompt": [1.5]}, {"prompt": "x", "n": 9}, {"prompt": "x", "stop": ["a"] * 17},
        {"prompt": "x", "stop": "y" * 257}, {"prompt": "x", "logprobs": 21}, {"prompt": "x", "max_tokens": 0},
        {"prompt": ["x"] * 9},
        {"prompt": "x", "logit_bias": {"4096": 1}}, {"prompt": "x", "top_p": 1.1}, {"prompt": "x" * 400_000}, {},
    ):  # fmt: skip
        error_of(http.post("/v1/completions", json=wrong), 400)
    assert not engine.received


def test_every_response_has_the_guard_s_headers(http: httpx.Client) -> None:
    for response in (http.get("/livez"), http.get("/nothing"), http.get("/livez", headers={"host": "evil.example"})):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-request-id"].startswith("req-")
        assert "access-control-allow-origin" not in response.headers
    assert http.get("/livez", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert http.get("/livez", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")
