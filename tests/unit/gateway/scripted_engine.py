"""An engine whose every word a test decides, and a gateway in front of it: real sockets, one process, two threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx

from kog_dist.gateway.args import GatewayArgs
from kog_dist.gateway.bind import HttpPort, listen
from kog_dist.gateway.limits import Limits
from kog_dist.gateway.logs import Log
from kog_dist.gateway.server import make_server, run
from kog_dist.gateway.service import Service
from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import (
    Accepted,
    Cancel,
    Done,
    EngineState,
    Error,
    ErrorCode,
    Event,
    FinishReason,
    Generate,
    Hello,
    Request,
    Status,
    StatusReport,
    Tokens,
    Welcome,
)

DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"
JSON = {"content-type": "application/json"}
WAIT_S = 10.0

REPORT = StatusReport(
    state=EngineState.READY, instance="scripted", model="demo", build="b", pid=1, world_size=2, rank_states=("ready", "ready"),
    beat_ages_s=(0.01, 0.02), uptime_s=1.0, running=None, waiting=(), queue_limit=64, num_completed=0, num_cancelled=0,
    num_failed=0, num_refused=0, num_dropped_clients=0, num_bad_messages=0, num_tokens=0,
)  # fmt: skip


@dataclass
class Received:
    """A request that the engine has got, and the way to answer it."""

    peer: bytes
    message: Generate
    engine: ScriptedEngine
    sent: int = field(default=0)

    def accept(self, num_prompt_tokens: int = 3, max_tokens: int = 1000, *, num_before: int = 0) -> None:
        self.engine.send(self.peer, Accepted(self.message.request_id, num_before, num_prompt_tokens, max_tokens))

    def say(self, text: str, count: int = 1) -> None:
        self.engine.send(self.peer, Tokens(self.message.request_id, self.sent, (7,) * count, text, ()))
        self.sent += count

    def finish(self, reason: FinishReason = FinishReason.STOP) -> None:
        self.engine.send(self.peer, Done(self.message.request_id, reason, 3, self.sent, 0.0, 0.1, 0.01, 0.02))

    def fail(self, code: ErrorCode, message: str, retry_after_s: float | None = None) -> None:
        self.engine.send(self.peer, Error(code, message, self.message.request_id, retry_after_s))


class ScriptedEngine:
    """Answers hello and status by itself; what becomes of a request is the test's business, or that of `on_generate`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.report = REPORT
        self.welcome = Welcome("b", "scripted", "demo", EngineState.READY, 2, 2048, 4096, True)
        self.answers_status = True
        self.received: list[Received] = []
        self.cancelled: list[str] = []
        self.on_generate: Callable[[Received], None] = lambda received: None
        self._outgoing: list[tuple[bytes, Event]] = []
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        """Listen, also again after `stop`: then it is another engine at the same address."""
        self._stop.clear()
        listener = RpcListener(self.folder)
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(WAIT_S)

    def send(self, peer: bytes, event: Event) -> None:
        with self._changed:
            self._outgoing.append((peer, event))

    def _serve(self, listener: RpcListener) -> None:
        while not self._stop.is_set():
            with self._changed:
                outgoing, self._outgoing = self._outgoing, []
            behind, kept = set[bytes](), list[tuple[bytes, Event]]()  # nothing of what a test says may be lost
            for peer, event in outgoing:
                if peer in behind or listener.send(peer, event) is Delivery.FULL:
                    behind.add(peer)
                    kept.append((peer, event))
            with self._changed:
                self._outgoing = kept + self._outgoing
            messages = listener.receive(64)
            for peer, message in messages:
                self._take(listener, peer, message)
            listener.flush()
            if not messages and len(kept) == len(outgoing):
                self._stop.wait(0.0005)
        listener.close(0.2)

    def _take(self, listener: RpcListener, peer: bytes, message: Request) -> None:
        match message:
            case Hello():
                listener.send(peer, self.welcome)
            case Status() if self.answers_status:
                listener.send(peer, self.report)
            case Generate():
                received = Received(peer, message, self)
                with self._changed:
                    self.received.append(received)
                    self._changed.notify_all()
                self.on_generate(received)
            case Cancel():
                with self._changed:
                    self.cancelled.append(message.request_id)
                    self._changed.notify_all()
                listener.send(peer, Done(message.request_id, FinishReason.CANCELLED, 3, 0, 0.0, 0.1))
            case _:
                pass

    def next_request(self, index: int = 0) -> Received:
        """The request with that number, once it is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.received) > index, WAIT_S), "the gateway sent no request"
            return self.received[index]

    def wait_cancelled(self, request_id: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.cancelled, WAIT_S), "nothing was cancelled"


def says(*pieces: str, finish: FinishReason | None = FinishReason.STOP) -> Callable[[Received], None]:
    """For `on_generate`: accept, say these texts, one token each, and finish, unless the test wants to go on."""

    def play(received: Received) -> None:
        received.accept()
        for piece in pieces:
            received.say(piece)
        if finish is not None:
            received.finish(finish)

    return play


class RunningGateway:
    """A gateway in a thread. Its loop is its own: what touches the service goes through `call`."""

    def __init__(self, args: GatewayArgs, http: HttpPort, limits: Limits, keys: Sequence[str], log_path: Path) -> None:
        self.url, self.port = http.url, http.listener.getsockname()[1]
        self.log_path = log_path
        self._args, self._http, self._limits, self._keys = args, http, limits, keys
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._started.wait(WAIT_S)
        until(lambda: self._error is not None or self.service.readiness.is_connected or not self._args.ends_with_engine)

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._error = error
            self._started.set()

    async def _run(self) -> None:
        with self.log_path.open("w", encoding="utf-8") as stream:
            log = Log(stream, log_format="json", with_prompts=self._args.log_prompts)
            self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self.service = Service(self._args, log, url=self.url, limits=self._limits)
            self.server = make_server(self.service, self._keys, self.port, self._limits)
            self._started.set()
            await run(self.service, self.server, self._http.listener, self._stop)
            log.close()

    def begin_stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        if not self.loop.is_closed():
            with contextlib.suppress(RuntimeError):
                self.begin_stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the gateway does not stop"
        if self._error is not None:
            raise self._error

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def gateway(
    engine: ScriptedEngine, folder: Path, *, limits: Limits | None = None, keys: Sequence[str] = (), model: Path | None = DEMO,
    **args: Any,
) -> Iterator[RunningGateway]:  # fmt: skip
    """A gateway of this engine on a free port."""
    http = listen("127.0.0.1", 0)
    made = GatewayArgs(
        listen_fd=-1, host="127.0.0.1", instance_folder=str(engine.folder), model=None if model is None else str(model),
        model_name="demo", drain_s=2.0,
    )  # fmt: skip
    running = RunningGateway(replace(made, **args), http, limits or Limits(), keys, folder / f"log-{http.listener.fileno()}")
    try:
        yield running
    finally:
        running.close()


def until(condition: Callable[[], object], limit_s: float = WAIT_S) -> float:
    """Wait for something that another thread brings about; returns the seconds it took."""
    begin_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begin_s < limit_s, "it did not happen in time"
        time.sleep(0.002)
    return time.monotonic() - begin_s


def frames_of(text: str) -> list[Any]:
    """The parsed `data:` lines of an SSE body, without comments; `[DONE]` as it is."""
    found = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) if line != "[DONE]" else line for line in found]


def raw_request(port: int, head: str, body: bytes = b"", *, read: bool = True) -> bytes:
    """Send bytes as they are, and read until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as connection:
        connection.sendall(head.encode() + body)
        answer = b""
        while read:
            with contextlib.suppress(ConnectionResetError):
                if chunk := connection.recv(65536):
                    answer += chunk
                    continue
            break
        return answer


def client(running: RunningGateway, **options: Any) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=WAIT_S, trust_env=False, **options)
