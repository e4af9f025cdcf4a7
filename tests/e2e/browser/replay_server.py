"""A server for the playground's tests: the static files under their security policy, and answers that follow a script.

One thread, and no framework. What the page does with a real gateway is tested elsewhere; here everything can be made to fail.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from kog_dist.gateway.pages import POLICY
from kog_dist.runtime.wait import Deadline

STRICT_POLICY = f"{POLICY}; require-trusted-types-for 'script'; trusted-types 'none'"  # so that text cannot become markup at all
NOTHING = "\u2013"  # what the page writes where there is no figure
TICK_S = 0.001  # tokens that are due are written this often
LOGPROBS = (-0.01, -0.5, -1.5, -3.0)  # of the pieces, in turn; each is the second-best but the first of four
INFO: dict[str, Any] = {
    "state": "ready", "model": {
        "id": "demo", "max_model_len": 2048, "num_lanes": 8, "num_parameters": 16_400_000, "format": "bfloat16",
    },
    "devices": [{"name": "CPU", "count": 4}],
    "engine": {"own_sampling": "temperature 1"},
    "speed": {"bytes_per_token": 14_686_720, "peak_bytes_s": 2e11, "peak_source": "measured copy"},
    "ranks": [{"rank": rank, "state": "ready", "beat_age_s": 0.01, "place": f"CPU {rank}"} for rank in range(4)], "replicas": [],
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """What the next requests get.

    A comment says that `place` requests are before them. `pieces` are sent at `tokens_per_s`, one token each, the first
    `num_reasoning` as a chat's reasoning. `end`: "done"
    (finish reason, usage, timings, [DONE]), "error" (an error event), "close" (the connection closes without a word), "hold"
    (nothing more comes). `status` other than 200 refuses.
    """

    place: int = 0
    num_read: int = 0  # tokens of the prompt, which another comment says; 0: none does
    queue_ms: float = 0.0
    pieces: Sequence[str] = ("    return", " n", "\n")
    num_reasoning: int = 0
    tokens_per_s: float = 2000.0
    first_after_s: float = 0.005
    end: str = "done"
    finish_reason: str = "stop"
    status: int = 200
    message: str = "refused by the script"
    headers: Mapping[str, str] = field(default_factory=dict)
    counts: bool = True  # running usage with each chunk
    calls: Sequence[Mapping[str, Any]] = ()  # behind the pieces: what chunks say of calls, one each
    drafted: tuple[int, int] = (0, 0)  # tokens that were proposed, and accepted of them


@dataclass
class Served:
    """A request that came, and how it ended."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    num_sent: int = 0
    disconnected: threading.Event = field(default_factory=threading.Event)


class ReplayServer:
    """Serves until closed. Attributes may be changed by the test's thread at any time; requests see what they find."""

    def __init__(self) -> None:
        self.script = Script()
        self.readiness: tuple[int, dict[str, Any]] = (200, {"state": "ready", "reason": "all ranks answer"})
        self.info: dict[str, Any] = dict(INFO)
        self.api_key: str | None = None
        self.is_silent = False  # about the engine's state: questions get no answer
        self.served: list[Served] = []
        self.tokenized: list[dict[str, Any]] = []
        self.has_tokenizer = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="replay server")
        self._thread.start()
        self._server = self._call(self._listen())
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Forget what a test has set."""
        self.script, self.readiness, self.info = Script(), (200, {"state": "ready", "reason": "all ranks answer"}), dict(INFO)
        self.api_key, self.served, self.is_silent = None, [], False
        self.tokenized, self.has_tokenizer = [], True

    def close(self) -> None:
        """Stop; streams that are still open are cut."""
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout=10)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._connection, "127.0.0.1", 0)

    async def _shut(self) -> None:
        self._server.close()
        await asyncio.sleep(0)  # connections that were just taken begin, so that their end closes them
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # a socket is closed a turn after its writer

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # browsers open connections that they do not use, and close them
        except asyncio.CancelledError:
            pass  # the server closes; asyncio would log this task as one that failed
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether the connection may be used for another one."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if path == "/tokenize":
            _write(writer, *self._tokenize(json.loads(body)))
            return True
        if method == "POST":
            await self._answer(Served(path, headers, json.loads(body)), reader, writer)
            return False
        while self.is_silent and path in ("/readyz", "/kog/info"):
            await asyncio.sleep(0.05)
        self._get(path, headers, writer)
        return True

    def _tokenize(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Words are tokens; a message has two more. Nothing can be counted if the model has no tokenizer."""
        texts = [body["prompt"]] if "prompt" in body else [f"{message['content']} x x" for message in body["messages"]]
        self.tokenized.append(body)
        return (200, {"count": len(" ".join(texts).split())}) if self.has_tokenizer else (400, {})

    def _refused(self, headers: Mapping[str, str]) -> bool:
        return self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}"

    def _get(self, path: str, headers: Mapping[str, str], writer: asyncio.StreamWriter) -> None:
        if path == "/readyz":
            _write(writer, self.readiness[0], self.readiness[1])
        elif path == "/kog/info":
            _write(writer, 401 if self._refused(headers) else 200, self.info)
        elif path == "/" or path.startswith("/static/"):
            name = "index.html" if path == "/" else path.removeprefix("/static/")
            file = resources.files("kog_dist.gateway") / "static" / name
            if "/" in name or not file.is_file():
                _write(writer, 404, {})
                return
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            policy = {"Content-Security-Policy": STRICT_POLICY, "Cache-Control": "max-age=600"}
            _write_bytes(writer, 200, kind, file.read_bytes(), policy)
        else:
            _write(writer, 404, {})

    async def _answer(self, served: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.served.append(served)
        script = self.script
        if self._refused(served.headers):
            script = Script(status=401, message="Incorrect API key provided.")
        if script.status != 200:
            _write(writer, script.status, {"error": {"message": script.message, "type": "kog", "code": None}}, script.headers)
            await writer.drain()
            return
        gone = asyncio.create_task(_watch(reader, served))
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n")
            await _stream(script, served, writer)
            if script.end == "hold":
                await gone
        except ConnectionError:
            served.disconnected.set()  # noticed by writing before it was by reading
            raise
        finally:
            gone.cancel()


async def _watch(reader: asyncio.StreamReader, served: Served) -> None:
    """The client says nothing after its request; an end of file means that it has gone."""
    try:
        await reader.read()
    except ConnectionError:
        pass
    served.disconnected.set()


async def _stream(script: Script, served: Served, writer: asyncio.StreamWriter) -> None:
    chat = served.path.endswith("/chat/completions")
    if script.place:
        writer.write(b": %d before this one\n\n" % script.place)
    if script.num_read:
        writer.write(b": %d of 30000 prompt tokens\n\n" % script.num_read)
    await asyncio.sleep(script.first_after_s)
    began_s = time.monotonic()
    while served.num_sent < len(script.pieces) and not served.disconnected.is_set():
        due = min(len(script.pieces), 1 + int((time.monotonic() - began_s) * script.tokens_per_s))
        if due > served.num_sent:
            pieces = script.pieces[served.num_sent : due]
            counts = range(served.num_sent + 1, due + 1)
            said = ("reasoning_content", "content") if chat else ("text", "text")
            frames = [
                _chunk(said[count > script.num_reasoning], piece, count if script.counts else None)
                for piece, count in zip(pieces, counts, strict=True)
            ]
            if "logprobs" in served.body:
                for frame, piece, count in zip(frames, pieces, counts, strict=True):
                    frame["choices"][0]["logprobs"] = _logprobs(chat, piece, LOGPROBS[(count - 1) % 4], served.body)
            writer.write(b"".join(map(_event, frames)))
            served.num_sent = due
            await writer.drain()
        await asyncio.sleep(TICK_S)
    for call in script.calls:
        writer.write(_event({"choices": [{"index": 0, "finish_reason": None, "delta": {"tool_calls": [call]}}]}))
    if script.end == "error":
        writer.write(_event({"error": {"message": "rank 2 was lost", "type": "server_error", "code": "rank_failed"}}))
    elif script.end == "done":
        seconds = max(time.monotonic() - began_s, 1e-6)
        usage = {"prompt_tokens": 12, "completion_tokens": served.num_sent, "total_tokens": 12 + served.num_sent}
        timings = {
            "queue_ms": script.queue_ms, "prompt_ms": script.first_after_s * 1e3,
            "predicted_n": served.num_sent, "predicted_ms": seconds * 1e3,
            "predicted_per_token_ms": seconds * 1e3 / max(1, served.num_sent - 1),
            "predicted_per_second": served.num_sent / seconds,
            **({"draft_n": script.drafted[0], "draft_n_accepted": script.drafted[1]} if script.drafted[0] else {}),
        }  # fmt: skip
        last = {"index": 0, "finish_reason": script.finish_reason, **_piece("content" if chat else "text", "")}
        writer.write(
            _event({"choices": [last]}) + _event({"choices": [], "usage": usage, "timings": timings}) + b"data: [DONE]\n\n"
        )


def _chunk(key: str, text: str, count: int | None) -> dict[str, Any]:
    choice = {"index": 0, "finish_reason": None, **_piece(key, text)}
    chunk: dict[str, Any] = {"id": "cmpl-1", "object": "chunk", "created": 1, "model": "demo", "choices": [choice]}
    if count is not None:
        chunk["usage"] = {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}
    return chunk


def _logprobs(chat: bool, text: str, logprob: float, body: Mapping[str, Any]) -> dict[str, Any]:
    """As the gateway has them: of the piece, and of one other that is a little more likely than it, but for the likeliest."""
    best = [(text, logprob), (" other", -4.6)] if logprob > -0.1 else [(" other", logprob + 0.1), (text, logprob)]
    best = best[: body.get("top_logprobs", body["logprobs"])]
    if not chat:
        return {"tokens": [text], "token_logprobs": [logprob], "top_logprobs": [dict(best)], "text_offset": [0]}
    entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
    return {"content": [{**entry, "top_logprobs": [{"token": name, "logprob": p, "bytes": None} for name, p in best]}]}


def _piece(key: str, text: str) -> dict[str, Any]:
    return {key: text} if key == "text" else {"delta": {key: text}}


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _write(writer: asyncio.StreamWriter, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
    _write_bytes(writer, status, "application/json", json.dumps(body).encode(), headers or {})


def _write_bytes(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
    fields = {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"HTTP/1.1 {status} Scripted\r\n{head}\r\n".encode() + body)


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Return once `condition` holds. Raises AssertionError naming `what` after `timeout_s`."""
    deadline = Deadline.after(timeout_s)
    while not condition():
        assert not deadline.expired(), f"{what}: not within {timeout_s} s"
        time.sleep(0.005)
