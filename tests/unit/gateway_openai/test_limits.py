"""Exact limits of a request's body, and what answers of several prompts and choices are said to have cost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.gateway.guard import Guard
from kog_dist.gateway.intake import received
from kog_dist.gateway.keys import ApiKeys
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.openai.accounting import response_usage, timings, usage
from kog_dist.gateway.openai.body import MAX_NESTING, read_body
from kog_dist.gateway.openai.errors import ApiError
from kog_dist.rpc.messages import Done, FinishReason


# ---- what was counted ----
def done(num_prompt: int, num_generated: int, cached: int = 0, **times: float | None) -> Done:
    return Done("a", FinishReason.STOP, num_prompt, num_generated, 0.0, 1.0, num_cached_tokens=cached, **times)  # type: ignore[arg-type]


def test_every_prompt_of_a_list_counts_once_and_every_choice_of_its_answers() -> None:
    """Two prompts with three choices each, which come prompt by prompt."""
    dones = [done(10, 1, 4), done(10, 2, 9), done(10, 3, 9), done(200, 4, 50), done(200, 5, 199), done(200, 6, 199)]
    assert usage(dones, 3) == {
        "prompt_tokens": 210,
        "completion_tokens": 21,
        "total_tokens": 231,
        "prompt_tokens_details": {"cached_tokens": 54},
    }
    assert usage(dones, 1)["prompt_tokens"] == 630
    assert usage(dones[:1], 1)["total_tokens"] == 11
    found = response_usage(dones[3], num_reasoning=3)
    assert found["output_tokens_details"] == {"reasoning_tokens": 3}
    assert (found["input_tokens"], found["output_tokens"], found["total_tokens"]) == (200, 4, 204)
    assert found["input_tokens_details"]["cached_tokens"] == 50


def test_times_of_several_choices_are_sums() -> None:
    found = timings([done(10, 5, 2, prefill_s=0.25, tokens_per_s=8.0), done(20, 3, 0, prefill_s=0.75, tokens_per_s=4.0)])
    assert (found["cache_n"], found["prompt_n"], found["prompt_ms"]) == (2, 28, 1000.0)
    assert (found["predicted_n"], found["predicted_ms"]) == (8, 1000.0), "four gaps of 1/8 s, two of 1/4 s"
    assert (found["predicted_per_token_ms"], found["predicted_per_second"]) == (round(1000 / 6, 3), 6.0)
    one_token = timings([done(10, 1, 10, prefill_s=None, tokens_per_s=None)])
    assert (one_token["prompt_n"], one_token["prompt_per_token_ms"], one_token["predicted_ms"]) == (0, None, None)


# ---- the body ----
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_a_body_nests_as_deep_as_it_may(opening: str, closing: str) -> None:
    def nested(depth: int) -> bytes:
        return (opening * depth + "1" + closing * depth).encode()

    assert MAX_NESTING == 64, "which docs/http.md says"
    read_body(nested(MAX_NESTING))
    with pytest.raises(ApiError, match=f"nests deeper than {MAX_NESTING} levels"):
        read_body(nested(MAX_NESTING + 1))


class Body:
    """A request whose body comes in chunks of `chunk` bytes; `said`: its Content-Length."""

    def __init__(self, num_bytes: int, said: str | None, chunk: int) -> None:
        self.headers = {"content-type": "application/json"} | ({} if said is None else {"content-length": said})
        self._sizes = [min(chunk, num_bytes - first) for first in range(0, num_bytes, chunk)]
        self.num_chunks_read = 0

    async def stream(self) -> AsyncIterator[bytes]:
        for size in self._sizes:
            self.num_chunks_read += 1
            yield b"x" * size


class Bodies:
    """The part of the service that counts them. `others`: bytes of bodies that are being read meanwhile."""

    def __init__(self, limits: Limits, others: int = 0) -> None:
        self.limits, self.bodies_bytes = limits, others
        self.bridge = SimpleNamespace(deliver=lambda: None)


def read(body: Body, service: Bodies) -> int:
    """Its length, or the status of the refusal."""

    async def main() -> int:
        try:
            async with received(body, service) as raw:  # type: ignore[arg-type]
                assert service.bodies_bytes >= len(raw), "it counts until it is answered"
                return len(raw)
        except ApiError as error:
            return error.status

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("num_bytes", "said", "found", "num_chunks_read"),
    [
        (1000, "1000", 1000, 10), (1000, None, 1000, 10), (1001, "1001", 413, 0), (1001, None, 413, 11), (1001, "5", 413, 11),
        (5, "1000", 5, 1), (5, "1001", 413, 0), (5000, None, 413, 11),
    ],
)  # fmt: skip
def test_a_body_may_be_as_long_as_it_may(num_bytes: int, said: str | None, found: int, num_chunks_read: int) -> None:
    """What is said to be too long is not read at all, and what is, not to its end."""
    body, service = Body(num_bytes, said, 100), Bodies(Limits(body_bytes=1000), others=7)
    assert read(body, service) == found
    assert body.num_chunks_read == num_chunks_read
    assert service.bodies_bytes == 7, "it gives back what it took"


@pytest.mark.parametrize(("others", "found"), [(500, 500), (501, 503)])
def test_all_bodies_together_may_be_as_long_as_they_may(others: int, found: int) -> None:
    service = Bodies(Limits(body_bytes=1000, bodies_bytes=1000), others)
    assert read(Body(500, None, 100), service) == found
    assert service.bodies_bytes == others


# ---- who may ask ----
def asked(guard: Guard, path: str = "/v1/models", method: str = "GET", **headers: str) -> tuple[int, dict[str, str]]:
    """Status and headers of an answer of the guard, or of an application that answers 200."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in {"host": "localhost:8000", **headers}.items()]
    scope: Any = {"type": "http", "method": method, "path": path, "headers": raw}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def application(_scope: Any, _receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def made(**changes: Any) -> Guard:
    log: Any = SimpleNamespace(problem=lambda *_, **__: pytest.fail("a mistake of ours"))
    return Guard(application, log, **{"host": "127.0.0.1", "port": 8000, "keys": ApiKeys(), **changes})


def test_a_request_id_is_kept_up_to_its_limit() -> None:
    for given, is_kept in (("a" * 64, True), ("a" * 65, False), ("a", True), ("", False), ("a b", False), ("a.b_c:d-9", True)):
        _, headers = asked(made(), x_request_id=given)
        assert (headers["x-request-id"] == given) is is_kept, given
        assert len(headers["x-request-id"]) <= 64


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:8000", 200), ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("LOCALHOST:8000", 200),
        ("localhost:8001", 403), ("localhost.evil.org", 403), ("evil.org:8000", 403), ("", 403), ("localhost:x", 403),
        ("localhost:99999", 403),
    ],
)  # fmt: skip
def test_a_service_of_this_machine_answers_to_its_own_names_only(host: str, status: int) -> None:
    assert asked(made(), host=host)[0] == status
    assert asked(made(host="0.0.0.0", keys=ApiKeys(["k"])), host=host, authorization="Bearer k")[0] == 200


def test_the_key_protects_everything_but_the_open_paths() -> None:
    guard = made(keys=ApiKeys(["secret"]))
    for header, status in (
        ({}, 401), ({"authorization": "Bearer secret"}, 200), ({"authorization": "bearer  secret "}, 200),
        ({"x_api_key": "secret"}, 200), ({"authorization": "Bearer secre"}, 401), ({"authorization": "Bearer secrett"}, 401),
        ({"authorization": "Bearer "}, 401), ({"authorization": "Basic secret"}, 401),
        ({"authorization": "Basic x", "x_api_key": "secret"}, 200),
    ):  # fmt: skip
        assert asked(guard, **header)[0] == status, header
    for path, status in (("/livez", 200), ("/static/a.js", 200), ("/metrics", 401), ("/static", 401), ("/livez/", 401)):
        assert asked(guard, path)[0] == status, path


def test_pages_of_others_are_refused_unless_they_are_named() -> None:
    for origins, origin, status, is_named in (
        ((), "http://localhost:8000", 200, False), ((), "https://localhost:8000", 200, False),
        ((), "http://localhost:9000", 403, False), (("http://a.org",), "http://a.org", 200, True),
        (("http://a.org",), "http://a.org.evil", 403, False), (("*",), "http://b.org", 200, True),
        ((), "ftp://localhost:8000", 403, False), ((), "null", 403, False),
        ((), "http://localhost:8000.evil.org", 403, False), ((), "http://localhost:8000@evil.org", 403, False),
    ):  # fmt: skip
        found, headers = asked(made(cors_origins=origins), origin=origin)
        assert (found, "access-control-allow-origin" in headers) == (status, is_named), (origins, origin)


def test_a_preflight_is_answered_without_a_key_only_to_pages() -> None:
    guard = made(keys=ApiKeys(["k"]), cors_origins=("http://a.org",))
    preflight = {"origin": "http://a.org", "access_control_request_method": "POST"}
    assert asked(guard, method="OPTIONS", **preflight)[0] == 204
    assert asked(guard, method="OPTIONS", **{**preflight, "origin": "http://b.org"})[0] == 403
    for wanted, allowed in (
        ("x-stainless-lang,x-stainless-os, Authorization", "x-stainless-lang,x-stainless-os, Authorization"),
        *((wanted, "authorization, content-type, x-api-key, x-request-id") for wanted in ("", "x" * 5000, "x\x00y")),
    ):
        _, headers = asked(guard, method="OPTIONS", access_control_request_headers=wanted, **preflight)
        assert headers["access-control-allow-headers"] == allowed
    assert asked(guard, method="OPTIONS")[0] == 401


@pytest.mark.parametrize(
    ("headers", "closes"),
    [({"content_length": "9"}, True), ({"transfer_encoding": "chunked"}, True), ({"content_length": "0"}, False), ({}, False)],
)
def test_a_connection_with_an_unread_body_is_closed(headers: dict[str, str], closes: bool) -> None:
    """The rest of the body would be taken for the next request."""
    _, found = asked(made(keys=ApiKeys(["k"])), method="POST", **headers)
    assert (found.get("connection") == "close") is closes
