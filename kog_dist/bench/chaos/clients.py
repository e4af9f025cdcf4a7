"""The clients of `kog-bench chaos`: each asks once, over RPC or HTTP, and writes down what it was told and when."""

from __future__ import annotations

import http.client
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import field
from urllib.parse import urlsplit

from kog_dist.errors import KogError, RequestFailed
from kog_dist.records import dataclass
from kog_dist.rpc.connection import Connection
from kog_dist.rpc.messages import Cancel, Done, Error, FinishReason, Generate, PrefillProgress, Tokens
from kog_dist.rpc.transport import Access

SILENCE_S = 15.0  # the engine speaks four times a second
_CONNECT_S, _AFTERWARDS_S = 5.0, 0.05


@dataclass(frozen=True, slots=True)
class Question:
    """A request, of which the answer is known."""

    prompt: str
    max_tokens: int
    regex: str | None = None


@dataclass
class ClientLog:
    """What one client saw. Its terminal events: of the protocol, or, if none came, the loss of the connection."""

    question: Question
    is_http: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_events: int = 0
    is_reading_prompt: bool = False
    begin_s: float = field(default_factory=time.monotonic)
    last_s: float = 0.0  # of the last piece of the answer
    ends: list[tuple[float, str]] = field(default_factory=list)
    has_left: bool = False  # by itself: what came was enough
    problems: list[str] = field(default_factory=list)

    def piece(self, text: str, token_ids: tuple[int, ...] = ()) -> None:
        """Note a piece of the answer."""
        if self.ends:
            self.problems.append("a piece of the answer after the end")
        self.text += text
        self.token_ids += token_ids
        self.num_events += 1
        self.last_s = time.monotonic()

    def end(self, how: str) -> None:
        """Note a terminal event."""
        self.ends.append((time.monotonic(), how))

    @property
    def how(self) -> str:
        """The first terminal event."""
        return self.ends[0][1] if self.ends else "no end"

    @property
    def is_harmed(self) -> bool:
        """Whether the answer is not what a client of a healthy engine gets."""
        return not self.has_left and self.how != "done"


class Asking(threading.Thread):
    """One client at work. `leave` makes it cancel (RPC) or disconnect (HTTP)."""

    def __init__(self, log: ClientLog, follow: Callable[[ClientLog, threading.Event], None]) -> None:
        super().__init__(daemon=True)
        self.log, self._follow, self._enough = log, follow, threading.Event()
        self.start()

    def run(self) -> None:
        """See threading.Thread."""
        try:
            self._follow(self.log, self._enough)
        except Exception as error:  # whatever it is, it is a finding and not the end of the run
            self.log.problems.append(f"the client itself failed: {type(error).__name__}: {error}")
            self.log.end("client failed")

    def leave(self) -> None:
        """What came is enough."""
        self._enough.set()


def ask(question: Question, access: Access, url: str | None = None) -> Asking:
    """Ask over HTTP if there is an URL, else over RPC."""
    log = ClientLog(question, url is not None)
    if url is None:
        return Asking(log, lambda log, enough: _follow_rpc(log, enough, access))
    return Asking(log, lambda log, enough: _follow_http(log, enough, url))


def _follow_rpc(log: ClientLog, enough: threading.Event, access: Access) -> None:
    question, request_id = log.question, secrets.token_hex(8)
    connection = Connection(access)
    try:
        connection.wait_connected(time.monotonic() + _CONNECT_S, patient=False)
        message = Generate(
            request_id,
            question.prompt,
            max_tokens=question.max_tokens,
            ignore_eos=question.regex is None,
            reuse_kv=False,
            regex=question.regex,
        )
        connection.send(message)
        _read_events(log, enough, connection, request_id)
    except RequestFailed as error:
        if not log.ends:
            log.end(str(error.code))
    except KogError as error:
        log.end(f"no connection: {error}")
    finally:
        connection.close()


def _read_events(log: ClientLog, enough: threading.Event, connection: Connection, request_id: str) -> None:
    silent_at_s = time.monotonic() + SILENCE_S
    until_s = float("inf")  # after its end, a request is followed a little longer
    while time.monotonic() < until_s:
        event = connection.receive(min(until_s, time.monotonic() + 0.1))
        if enough.is_set() and not log.has_left and not log.ends:
            log.has_left = True
            connection.send(Cancel(request_id))
        if event is None:
            if time.monotonic() > silent_at_s and not log.ends:
                log.end("silence")
                return
            continue
        silent_at_s = time.monotonic() + SILENCE_S
        match event:
            case Tokens():
                if event.index != len(log.token_ids):
                    log.problems.append(f"tokens begin at {event.index}, {len(log.token_ids)} had come")
                log.piece(event.text, event.token_ids)
            case PrefillProgress():
                log.is_reading_prompt = True
            case Done():
                is_whole = event.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
                log.end("done" if is_whole else event.finish_reason.value)
                until_s = time.monotonic() + _AFTERWARDS_S
            case Error() if log.has_left and log.ends:
                pass  # it had ended before the cancel came: there is no such request any more
            case Error():
                log.end(event.code.value)
                until_s = time.monotonic() + _AFTERWARDS_S


def _follow_http(log: ClientLog, enough: threading.Event, url: str) -> None:
    parts, question = urlsplit(url), log.question
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=SILENCE_S)
    body: dict[str, object] = {
        "prompt": question.prompt,
        "max_tokens": question.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "cache_salt": secrets.token_hex(8),  # so that nothing of an earlier answer is read instead
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            log.end(f"status {answer.status}")
            answer.read()
            return
        for line in answer:
            if enough.is_set() and not log.ends:
                log.has_left = True
                return
            _read_line(log, line)
        if not log.ends:
            log.end("broken off")
    except TimeoutError:
        log.end("silence")
    except (OSError, http.client.HTTPException, ValueError):
        if not log.ends:
            log.end("broken off")
    finally:
        connection.close()


def _read_line(log: ClientLog, line: bytes) -> None:
    if line.startswith(b"data: [DONE]"):
        log.end("done")
    elif line.startswith(b"data: {"):
        frame = json.loads(line[6:])
        if "error" in frame:
            log.end(str(frame["error"]["code"]))
        elif text := "".join(choice["text"] for choice in frame["choices"]):
            log.piece(text)
