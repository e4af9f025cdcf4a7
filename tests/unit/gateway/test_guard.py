"""Who may ask: hosts, origins, keys and preflights, of an application that is called directly."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kog_dist.gateway.guard import KEY_SCOPE, OPEN_PATHS, Guard
from kog_dist.gateway.keys import ApiKeys
from kog_dist.gateway.logs import Log

LOCAL = (b"host", b"localhost:8000")
JSON_POST = {"method": "POST", "path": "/v1/chat/completions"}
KEY = (b"authorization", b"Bearer alice-alice")


class Call:
    """One request to a guarded application, and what came of it."""

    def __init__(
        self, headers: Iterable[tuple[bytes, bytes]], *, method: str = "GET", path: str = "/v1/models",
        fails: Exception | None = None, body: Iterable[dict[str, Any]] = (), begins: bool = True, **guard: Any,
    ) -> None:  # fmt: skip
        self.scope = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        self.reached, self.sent, self.problems = False, list[dict[str, Any]](), list[dict[str, Any]]()
        self.noted = list[tuple[str, int]]()
        self._body, self._fails, self._begins = list(body), fails, begins
        log = SimpleNamespace(problem=lambda event, text, **more: self.problems.append({"event": event, "text": text, **more}))
        settings = {"host": "127.0.0.1", "port": 8000, "keys": ApiKeys(), "on_response": lambda *noted: self.noted.append(noted)}
        made = Guard(self._application, cast(Log, log), **cast(Any, {**settings, **guard}))
        asyncio.run(made(self.scope, self._receive, self._send))

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached = True
        for _ in self._body[:]:
            await receive()
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        if self._fails is not None:
            raise self._fails
        await send({"type": "http.response.body", "body": b"ok"})

    async def _receive(self) -> dict[str, Any]:
        return self._body.pop(0)

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def code(self) -> str:
        return str(json.loads(self.sent[1]["body"])["error"]["code"])


@pytest.mark.parametrize(
    ("bound", "host", "is_own"),
    [
        ("127.0.0.1", "localhost:8000", True),
        ("127.0.0.1", "LOCALHOST:8000", True),
        ("127.0.0.1", "127.0.0.1:8000", True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "localhost:", True),
        ("127.0.0.1", "[::1]:8000", True),
        ("::1", "[::1]", True),
        ("127.0.0.1", "localhost:8001", False),
        ("127.0.0.1", "localhost:80000", False),
        ("127.0.0.1", "localhost:999999", False),
        ("127.0.0.1", "example.org:8000", False),
        ("127.0.0.1", "localhost.example.org", False),
        ("127.0.0.1", "user@localhost", False),
        ("127.0.0.1", "localhost/", False),
        ("127.0.0.1", "localhost#a", False),
        ("127.0.0.1", "", False),
        ("0.0.0.0", "example.org:8000", True),  # a key protects it
        ("0.0.0.0", "", True),
    ],
)
def test_hosts(bound: str, host: str, is_own: bool) -> None:
    call = Call([(b"host", host.encode())], host=bound)
    assert call.reached is is_own
    assert call.status == (200 if is_own else 403)
    if not is_own:
        assert call.code == "forbidden_host"


@pytest.mark.parametrize(
    ("headers", "more", "code"),
    [
        ([(b"origin", b"https://evil.example")], {}, "forbidden_origin"),
        ([(b"origin", b"null")], {}, "forbidden_origin"),
        ([(b"origin", b"http://localhost:8000")], {}, None),
        ([(b"origin", b"https://LOCALHOST:8000")], {}, None),
        ([(b"origin", b"http://localhost:8001")], {}, "forbidden_origin"),
        ([(b"origin", b"https://a.example")], {"cors_origins": ("https://a.example",)}, None),
        ([(b"origin", b"https://b.example")], {"cors_origins": ("https://a.example",)}, "forbidden_origin"),
        ([(b"origin", b"https://b.example")], {"cors_origins": ("*",)}, None),
        ([(b"sec-fetch-site", b"cross-site")], JSON_POST, "forbidden_origin"),
        ([(b"sec-fetch-site", b"same-site")], JSON_POST, "forbidden_origin"),
        ([(b"sec-fetch-site", b"same-origin")], JSON_POST, None),
        ([(b"sec-fetch-site", b"none")], JSON_POST, None),
        ([], JSON_POST, None),
        ([(b"sec-fetch-site", b"cross-site")], {"method": "GET"}, None),  # a link to the playground
        ([(b"sec-fetch-site", b"cross-site"), (b"origin", b"http://localhost:8000")], JSON_POST, None),
    ],
)
def test_origins(headers: list[tuple[bytes, bytes]], more: dict[str, Any], code: str | None) -> None:
    call = Call([LOCAL, *headers], **more)
    assert call.reached is (code is None)
    assert call.status == (200 if code is None else 403)
    assert code in (None, call.code if code else None)


def test_pages_that_may_ask_are_told_so() -> None:
    allowed = {
        b"access-control-allow-origin": b"https://a.example",
        b"access-control-expose-headers": b"x-request-id, retry-after",
    }
    call = Call([LOCAL, (b"origin", b"https://a.example")], cors_origins=("https://a.example",))
    assert call.headers.items() >= {**allowed, b"vary": b"origin", b"a": b"b"}.items()
    own = Call([LOCAL, (b"origin", b"http://localhost:8000")])
    refused = Call([LOCAL, (b"origin", b"https://evil.example")])
    assert not [name for one in (own, refused, Call([LOCAL])) for name in one.headers if name.startswith(b"access-control")]


@pytest.mark.parametrize(
    ("wanted", "allowed"),
    [
        (b"x-stainless-lang, content-type", b"x-stainless-lang, content-type"),
        (b"", b"authorization, content-type, x-api-key, x-request-id"),
        (b"a\nb", b"authorization, content-type, x-api-key, x-request-id"),
        (b"a" * 4096, b"a" * 4096),
        (b"a" * 4097, b"authorization, content-type, x-api-key, x-request-id"),
    ],
)
def test_preflights_need_no_key_and_allow_any_headers(wanted: bytes, allowed: bytes) -> None:
    asked = [
        LOCAL, (b"origin", b"https://a.example"), (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", wanted),
    ]  # fmt: skip
    call = Call(asked, method="OPTIONS", cors_origins=("https://a.example",), keys=ApiKeys(["alice-alice"]))
    assert (call.status, call.reached) == (204, False)
    assert call.headers[b"access-control-allow-headers"] == allowed
    assert call.headers[b"access-control-allow-methods"] == b"GET, HEAD, POST, OPTIONS"
    assert call.headers[b"access-control-max-age"] == b"600"
    assert call.sent[1] == {"type": "http.response.body", "body": b""}


def test_not_everything_is_a_preflight() -> None:
    asks = (b"access-control-request-method", b"POST")
    assert Call([LOCAL, asks], method="OPTIONS").reached
    assert Call([LOCAL, (b"origin", b"http://localhost:8000")], method="OPTIONS").reached
    assert Call([LOCAL, (b"origin", b"http://localhost:8000"), asks], method="POST").reached
    assert Call([LOCAL, (b"origin", b"https://evil.example"), asks], method="OPTIONS").code == "forbidden_origin"
    assert Call([LOCAL, asks], method="OPTIONS", keys=ApiKeys(["alice-alice"])).status == 401, "without an origin"


@pytest.mark.parametrize(
    ("headers", "is_in"),
    [
        ([KEY], True),
        ([(b"authorization", b"bearer   alice-alice ")], True),
        ([(b"x-api-key", b"alice-alice")], True),
        ([(b"x-api-key", b" alice-alice\t")], True),
        ([(b"authorization", b"Basic x"), (b"x-api-key", b"alice-alice")], True),
        ([(b"authorization", b"Bearer wrong"), (b"x-api-key", b"alice-alice")], False),
        ([(b"authorization", b"alice-alice")], False),
        ([(b"authorization", b"Bearer")], False),
        ([(b"authorization", b"Bearer alice-alicf")], False),
        ([(b"authorization", b"Bearer alice-alic")], False),
        ([], False),
    ],
)
def test_keys(headers: list[tuple[bytes, bytes]], is_in: bool) -> None:
    call = Call([LOCAL, *headers], keys=ApiKeys(["alice-alice", "bob-bob-bob"]))
    assert call.reached is is_in
    assert call.scope[KEY_SCOPE] == (ApiKeys(["alice-alice", "b"]).scope_of(b"alice-alice") if is_in else "")
    if not is_in:
        assert (call.status, call.code, call.headers[b"www-authenticate"]) == (401, "invalid_api_key", b"Bearer")


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/static/a.js"])
def test_some_paths_are_open(path: str) -> None:
    call = Call([LOCAL], path=path, keys=ApiKeys(["alice-alice"]))
    assert (call.reached, call.scope[KEY_SCOPE]) == (True, "")


@pytest.mark.parametrize("path", ["/static", "/metrics", "/kog/info", "/v1/models", "//", "/livez/"])
def test_others_are_not(path: str) -> None:
    assert not Call([LOCAL], path=path, keys=ApiKeys(["alice-alice"])).reached
    assert Call([LOCAL], path=path).reached


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [(b"a", True), (b"A-z_0.9:b", True), (b"a" * 64, True), (b"a" * 65, False), (b"", False), (b"a b", False)],
)
def test_a_request_has_an_id(given: bytes, is_kept: bool) -> None:
    call = Call([LOCAL, (b"x-request-id", given)])
    assert call.headers[b"x-request-id"].decode() == call.scope["kog.request_id"]
    assert (call.headers[b"x-request-id"] == given) is is_kept
    assert is_kept or re.fullmatch(rb"req-[0-9a-f]{24}", call.headers[b"x-request-id"])
    assert call.headers.items() >= {(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")}
    assert call.noted == [("/v1/models", 200)]


@pytest.mark.parametrize(
    ("headers", "body", "closes"),
    [
        ([], [], False),
        ([(b"content-length", b"0")], [], False),
        ([(b"content-length", b"5")], [], True),
        ([(b"transfer-encoding", b"chunked")], [], True),
        ([(b"content-length", b"0"), (b"transfer-encoding", b"chunked")], [], True),
        ([(b"content-length", b"5")], [{"more_body": True}], True),
        ([(b"content-length", b"5")], [{"more_body": True}, {"more_body": False}], False),
        ([(b"content-length", b"5")], [{}], False),
    ],
)
def test_a_connection_with_an_unread_body_is_closed(
    headers: list[tuple[bytes, bytes]], body: list[dict[str, Any]], closes: bool
) -> None:
    assert (b"connection" in Call([LOCAL, *headers], body=body).headers) is closes


def test_a_mistake_is_an_answer_and_a_line_in_the_log() -> None:
    call = Call([LOCAL], fails=ValueError("a"), begins=False)
    assert (call.status, call.code) == (500, "internal_error")
    (problem,) = call.problems
    assert (problem["event"], problem["text"]) == ("internal_error", "GET /v1/models: ValueError: a")
    assert problem["request_id"] == call.scope["kog.request_id"]
    assert re.fullmatch(r"test_guard\.py:\d+", problem["where"])
    late = Call([LOCAL], fails=ValueError("a"))
    assert [message["type"] for message in late.sent] == ["http.response.start"], "an answer is begun once"
    assert len(late.problems) == 1


def test_other_protocols() -> None:
    reached = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    guard = Guard(application, cast(Log, None), host="127.0.0.1", port=1, keys=ApiKeys())
    for kind in ("lifespan", "websocket"):
        asyncio.run(guard({"type": kind}, cast(Any, None), cast(Any, None)))
    assert reached == ["lifespan"]
