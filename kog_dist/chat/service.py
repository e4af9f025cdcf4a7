"""A synchronous client of an OpenAI-compatible service, for one conversation: one socket for each answer, every wait bounded."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

from kog_dist.chat.wire import EventParser, ResponseParser, ServiceUrl, error_text, request_bytes
from kog_dist.errors import LaunchError, ProtocolError, RequestError, RequestFailed
from kog_dist.records import dataclass

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 10.0  # for what is not generated
TICK_S: Final = 0.1  # how often a stream that is silent says so
_READ_BYTES: Final = 1 << 16
_MAX_PLAIN_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer, or of the `reasoning` in front of it, which is no part of it. A service may leave out: `num_tokens` of
    the answer so far; `num_before`, requests before this one; `prompt_read`, tokens of the prompt that have been read, and all;
    `queue_ms`, how long it waited; `drafts`, tokens that were drafted and right, and all that were drafted."""

    text: str = ""
    num_tokens: int | None = None
    finish_reason: str | None = None
    num_prompt_tokens: int | None = None
    num_before: int | None = None
    prompt_read: tuple[int, int] | None = None
    queue_ms: float | None = None
    reasoning: str = ""
    drafts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What is served. The last four are known of our own service only."""

    model: str
    num_ranks: int | None = None
    has_chat: bool = True  # whether the model has a chat template
    state: str | None = None
    own_sampling: str = ""  # what the model answers with where a request says nothing


class ChatService:
    """Where the service is, and the key for it."""

    def __init__(self, url: ServiceUrl, api_key: str = "", *, silence_s: float = 120.0) -> None:
        """`silence_s`: how long an answer may say nothing before it counts as lost."""
        self.url = url
        self._api_key, self._silence_s = api_key, silence_s

    def facts(self, model: str | None) -> ServiceFacts:
        """What is served under `model`, or the first model of the list. Raises LaunchError if nobody answers."""
        found = self._get(f"{self.url.root}/kog/info", may_miss=True)
        if isinstance(found, dict) and isinstance(found.get("model"), dict):
            served = found["model"]
            name = model or str(served.get("id") or "default")
            state, ranks = found.get("state"), found.get("ranks")
            num_ranks = len(ranks) if isinstance(ranks, list) and ranks else None
            engine = found.get("engine")
            own = engine.get("own_sampling") if isinstance(engine, dict) else None
            has_chat = served.get("chat") not in ("plain", None)
            return ServiceFacts(name, num_ranks, has_chat, str(state) if state else None, own if isinstance(own, str) else "")
        if model is not None:
            return ServiceFacts(model)
        listed = self._get(f"{self.url.prefix}/models")
        try:
            return ServiceFacts(str(listed["data"][0]["id"]))
        except (TypeError, KeyError, IndexError):
            raise LaunchError(f"the service at {self.url} lists no model; name one with --model") from None

    def stream(self, path: str, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """Ask for an answer and yield its pieces; an empty piece every TICK_S while nothing comes.

        Leaving the iterator closes the connection, which cancels the request. Raises RequestError when it is refused,
        RequestFailed when the answer breaks off, LaunchError when there is no service.
        """
        request = request_bytes(self.url, "POST", f"{self.url.prefix}{path}", body=body, api_key=self._api_key)
        response, events, is_finished, plain = ResponseParser(), EventParser(), False, b""
        with closing(self._connect()) as connection:
            connection.sendall(request)
            for received in self._read(connection, response):
                if not received:
                    yield Piece()
                elif response.status != 200 or not response.fields.get("content-type", "").startswith("text/event-stream"):
                    plain = (plain + received)[:_MAX_PLAIN_BYTES]
                else:
                    payloads = events.feed(received)
                    if not payloads and (events.num_before, events.prompt_read) != (None, None):
                        yield Piece(num_before=events.num_before, prompt_read=events.prompt_read)
                    for payload in payloads:
                        is_finished = is_finished or payload == b"[DONE]"
                        yield from _pieces(payload)
        if response.status != 200:
            raise self._refusal(response.status, plain)
        if not is_finished:
            raise RequestFailed("incomplete", "the answer broke off: the service ended the stream without its end")

    def _refusal(self, status: int, body: bytes) -> RequestError:
        text = error_text(status, body)
        if status in (401, 403):
            text += "; give the key with --api-key-file or in KOG_API_KEY"
        return RequestError(str(status), text)

    def _get(self, path: str, *, may_miss: bool = False) -> Any:
        response, body = ResponseParser(), b""
        with closing(self._connect()) as connection:
            connection.sendall(request_bytes(self.url, "GET", path, api_key=self._api_key))
            for received in self._read(connection, response, ANSWER_TIMEOUT_S):
                body = (body + received)[:_MAX_PLAIN_BYTES]
        if response.status in (401, 403):
            raise self._refusal(response.status, body)
        if response.status != 200 and may_miss:
            return None
        if response.status != 200:
            raise LaunchError(f"{self.url}{path} says {error_text(response.status, body)}; is it an OpenAI-compatible service?")
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise LaunchError(f"{self.url}{path} is not JSON; is it an OpenAI-compatible service?") from None

    def _connect(self) -> socket.socket:
        try:
            if self.url.socket:
                return _connect_file(self.url.socket)
            connection = socket.create_connection((self.url.host, self.url.port), CONNECT_TIMEOUT_S)
            if self.url.is_tls:
                return ssl.create_default_context().wrap_socket(connection, server_hostname=self.url.host)
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
            raise LaunchError(
                f"no service answers at {self.url}: {reason}; start one with kog-launch, or give another --url"
            ) from None
        return connection

    def _read(self, connection: socket.socket, response: ResponseParser, silence_s: float | None = None) -> Iterator[bytes]:
        """What comes of the body; b"" after each TICK_S without a byte."""
        limit_s = silence_s if silence_s is not None else self._silence_s
        connection.settimeout(TICK_S)
        heard_s = time.monotonic()
        while not response.is_complete:
            try:
                received = connection.recv(_READ_BYTES)
            except TimeoutError:
                if time.monotonic() - heard_s > limit_s:
                    raise RequestFailed("timeout", f"the service at {self.url} has said nothing for {limit_s:g} s") from None
                yield b""
                continue
            except OSError as error:
                raise RequestFailed("lost", f"the connection to {self.url} was lost: {error.strerror}") from None
            heard_s = time.monotonic()
            try:
                if not received:
                    response.end_of_connection()
                body = response.feed(received) if received else b""
            except ProtocolError as error:
                raise RequestFailed("lost", f"{error} ({self.url})") from None
            if body:
                yield body


def _connect_file(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _pieces(payload: bytes) -> Iterator[Piece]:
    """What one event of the stream brings. Raises RequestFailed if it is an error."""
    if payload == b"[DONE]":
        return
    try:
        chunk = json.loads(payload)
        error, usage, timings = chunk.get("error"), chunk.get("usage"), chunk.get("timings") or {}
        queue_ms, right, drafted = (timings.get(name) for name in ("queue_ms", "draft_n_accepted", "draft_n"))
        pieces = [] if error else [_piece(choice, _count_in(usage, "completion_tokens")) for choice in chunk.get("choices") or ()]
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise RequestFailed("protocol", f"the service sent a chunk that cannot be read: {payload[:80]!r}") from None
    if error:
        message = error.get("message", error) if isinstance(error, dict) else error
        raise RequestFailed("stream", " ".join(str(message).split())[:300])
    yield from pieces
    if usage and not pieces:
        yield Piece(
            num_tokens=_count_in(usage, "completion_tokens"),
            num_prompt_tokens=_count_in(usage, "prompt_tokens"),
            queue_ms=queue_ms if isinstance(queue_ms, int | float) else None,
            drafts=(right, drafted) if type(right) is type(drafted) is int else None,
        )


def _piece(choice: Any, num_tokens: int | None) -> Piece:
    """Raises TypeError, AttributeError for what is no choice."""
    delta = choice.get("delta") or {}
    text, reasoning = choice.get("text") or delta.get("content") or "", delta.get("reasoning_content") or ""
    finish_reason = choice.get("finish_reason")
    if not isinstance(text, str) or not isinstance(reasoning, str) or not isinstance(finish_reason, str | None):
        raise TypeError("a text is none")
    return Piece(text, num_tokens, finish_reason, reasoning=reasoning)


def _count_in(usage: object, name: str) -> int | None:
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count < 2**53 else None
