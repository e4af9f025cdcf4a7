"""A small OpenAI-compatible server in a thread, whose answers a test writes down beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Scripted:
    """One answer: the pieces of its body in the order in which they are written, each a chunk of the transfer coding."""

    pieces: Sequence[bytes] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    cut_off: bool = False  # the connection ends instead of the body
    hangs_up: bool = False  # the connection ends after the body, without notice
    wait: threading.Event | None = None  # before the last piece


@dataclass
class OpenAiStub:
    """Its address, what it was asked, and what it answers; the last answer is repeated."""

    url: str
    answers: list[Scripted] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    models: Any = field(default_factory=lambda: {"data": [{"id": "stub"}]})
    info: Any = None  # of /kog/info; None: there is none
    num_lost_clients: int = 0

    def next_answer(self) -> Scripted:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def event(chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def completion(
    texts: Sequence[str], *, usage: dict[str, Any] | None = None, finish: str | None = "length", **last: Any
) -> list[bytes]:
    """Events of a /v1/completions stream; `last` is put into the final chunk."""
    chunks = [event({"choices": [{"text": text, "finish_reason": None}]}) for text in texts]
    if finish is not None:
        chunks.append(event({"choices": [{"text": "", "finish_reason": finish}], **last}))
    return [*chunks, *([event({"choices": [], "usage": usage})] if usage else []), DONE]


def chat(
    texts: Sequence[str], *, usage: dict[str, Any] | None = None, finish: str = "stop", reasoning: Sequence[str] = (), **last: Any
) -> list[bytes]:
    """Events of a /v1/chat/completions stream, the role first; `last` is put into the final chunk."""
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *({"reasoning_content": text} for text in reasoning),
        *({"content": text} for text in texts),
    ]
    chunks = [event({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas]
    chunks.append(event({"choices": [{"delta": {}, "finish_reason": finish}], **last}))
    return [*chunks, *([event({"choices": [], "usage": usage})] if usage else []), DONE]


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # `server_close` waits for them

    def handle_error(self, *_: Any) -> None:
        """A client that resets its connection is nothing to talk about."""


@contextmanager
def openai_stub(*answers: Scripted) -> Iterator[OpenAiStub]:
    """A stub that serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            found = stub.models if "/models" in self.path else stub.info
            body = json.dumps(found).encode()
            self._answer(Scripted([body], content_type="application/json", status=404 if found is None else 200))

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.requests.append(asked | {"path": self.path})
            stub.headers.append({name.lower(): value for name, value in self.headers.items()})
            try:
                self._answer(stub.next_answer())
            except OSError:
                stub.num_lost_clients += 1
                self.close_connection = True

        def _answer(self, answer: Scripted) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for idx, piece in enumerate(answer.pieces):
                if answer.wait is not None and idx == len(answer.pieces) - 1:
                    assert answer.wait.wait(30), "the test did not let the answer go on"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            if not answer.cut_off:
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = answer.cut_off or answer.hangs_up

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = _Server(("127.0.0.1", 0), Handler)
    stub = OpenAiStub(f"http://127.0.0.1:{server.server_address[1]}", list(answers))
    thread = threading.Thread(target=lambda: server.serve_forever(0.01))
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
