"""`kog-bench gateway`: how long a token takes from the engine to a client, over RPC and over HTTP, on this machine.

The fake engine writes into each token's text the moment at which it has it; the client, on the same monotonic clock, notes
when `recv` has given it the bytes. In between are the engine's making and encoding of the event, the sockets, the gateway, and
the client's own wake-up. What the client makes of the bytes comes after. It reads as httpx does under the official client: one
thread, a blocking socket with a time limit. `arrival` is the same with the kernel's moment of putting the bytes into the client's
socket: the path without the client's wake-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from kog_dist.bench.engine.processes import child_process, wait_ready
from kog_dist.bench.report import finish, machine, percentile
from kog_dist.bench.service.client import LoadClient
from kog_dist.chat.wire import EventParser, ResponseParser, ServiceUrl, error_text, request_bytes
from kog_dist.config import LaunchConfig
from kog_dist.errors import RequestFailed
from kog_dist.gateway.args import GatewayArgs
from kog_dist.launch.target import model_folder
from kog_dist.records import dataclass
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Tokens
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access

INSTANCE = "path"
_TIMEOUT_S = 30.0
_RECEIVE_BYTES = 1 << 16  # as httpcore
_SO_TIMESTAMPNS = 35  # of Linux, on all but a few old architectures; the type of the message that carries it, too
_TIMESPEC = struct.Struct("@ll")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _Sample:
    """Of one way to the engine: microseconds of each token, and what the processes spent on them."""

    delays_us: list[float] = field(default_factory=list)
    num_events: int = 0
    cpu_us: dict[str, float] = field(default_factory=dict)  # by process, of all tokens together

    def summary(self) -> dict[str, Any]:
        num_tokens = len(self.delays_us)
        return {
            "p50_us": percentile(self.delays_us, 0.5),
            "p99_us": percentile(self.delays_us, 0.99),
            "tokens": num_tokens,
            "tokens_per_event": num_tokens / self.num_events,
            "cpu_us_per_token": {name: spent / num_tokens for name, spent in self.cpu_us.items()},
        }


def run(rate: float, *, num_tokens: int, repeats: int) -> None:
    """Measure both ways in turns; prints a line for each, what HTTP adds, then the JSON object. Raises LaunchError."""
    before = machine()
    rpc, http, arrival = _Sample(), _Sample(), _Sample()
    with _service(rate) as (access, url, pids):
        _receive_rpc(access, 200)
        _receive_http(url, 200)
        for _ in range(repeats):
            with _spent(rpc, pids):
                _add(rpc, _receive_rpc(access, num_tokens))
            with _spent(http, pids):
                _add(http, _receive_http(url, num_tokens))
            with _spent(arrival, pids):
                _add(arrival, _receive_http(url, num_tokens, _SocketStamps))
    figures = {"rpc": rpc.summary(), "http": http.summary(), "arrival": arrival.summary()}
    for name, figure in figures.items():
        spent = ", ".join(f"{who} {cpu_us:.0f}" for who, cpu_us in figure["cpu_us_per_token"].items())
        print(
            f"{name:<8}sent to received p50 {figure['p50_us']:.0f} us, p99 {figure['p99_us']:.0f} us; "
            f"{figure['tokens_per_event']:.2f} tokens per event; CPU us per token: {spent}"
        )
    added = {name: figures["http"][name] - figures["rpc"][name] for name in ("p50_us", "p99_us")}
    print(f"HTTP adds p50 {added['p50_us']:+.0f} us, p99 {added['p99_us']:+.0f} us at {rate:g} tokens/s", flush=True)
    finish("gateway", {"rate": rate, "tokens": num_tokens, "repeats": repeats}, before, figures | {"added": added})


def _add(sample: _Sample, pairs: Sequence[tuple[str, int]]) -> None:
    """Count events: the text that came, which names its moments of sending, and the moment of its reception."""
    for text, received_ns in pairs:
        sample.delays_us += [(received_ns - int(sent_ns)) / 1e3 for sent_ns in text.split()]
    sample.num_events += len(pairs)


def _receive_rpc(access: Access, num_tokens: int) -> list[tuple[str, int]]:
    pairs = []
    with Client(access) as client:
        for event in client.generate(prompt="x", max_tokens=num_tokens, ignore_eos=True):
            if isinstance(event, Tokens):
                pairs.append((event.text, time.monotonic_ns()))
    return pairs


class _ReceiverStamps:
    """Stamps bytes when `recv` has returned with them."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self) -> tuple[bytes, int]:
        """The next bytes and their moment, on the monotonic clock."""
        return self._connection.recv(_RECEIVE_BYTES), time.monotonic_ns()


class _SocketStamps(_ReceiverStamps):
    """Stamps bytes when the kernel has put the last of them into the socket."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    def receive(self) -> tuple[bytes, int]:
        """The next bytes and their moment: the kernel's is on the clock of the day, which is compared with ours now."""
        piece, notes, _flags, _address = self._connection.recvmsg(_RECEIVE_BYTES, socket.CMSG_SPACE(_TIMESPEC.size))
        now_ns, today_ns = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_REALTIME)
        if not notes:
            return piece, now_ns
        seconds, nanoseconds = _TIMESPEC.unpack(notes[0][2])
        return piece, now_ns - (today_ns - seconds * 1_000_000_000 - nanoseconds)


def _receive_http(url: ServiceUrl, num_tokens: int, stamps: type[_ReceiverStamps] = _ReceiverStamps) -> list[tuple[str, int]]:
    body = {"model": "default", "prompt": "x", "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    received = _exchange(url, request_bytes(url, "POST", f"{url.prefix}/completions", body=body), stamps)
    pairs = []
    for payload, stamp_ns in received:
        if payload != b"[DONE]" and (choices := json.loads(payload).get("choices")) and choices[0]["text"]:
            pairs.append((choices[0]["text"], stamp_ns))
    if sum(len(text.split()) for text, _ in pairs) != num_tokens:
        raise RequestFailed("incomplete", f"the gateway sent fewer than the {num_tokens} tokens that were asked for")
    return pairs


def _exchange(url: ServiceUrl, request: bytes, stamps: type[_ReceiverStamps]) -> list[tuple[bytes, int]]:
    """Payloads of the answer's events, each with the moment of its bytes."""
    response, events, plain = ResponseParser(), EventParser(), b""
    received: list[tuple[bytes, int]] = []
    with socket.create_connection((url.host, url.port), timeout=_TIMEOUT_S) as connection:
        receiver = stamps(connection)
        connection.sendall(request)
        while not response.is_complete:
            piece, moment_ns = receiver.receive()
            if not piece:
                raise RequestFailed("incomplete", "the gateway closed the connection before its answer was complete")
            body = response.feed(piece)
            if response.status == 200:
                received += [(payload, moment_ns) for payload in events.feed(body)]
            else:
                plain += body
    if response.status != 200:
        raise RequestFailed("http", error_text(response.status, plain))
    return received


@contextlib.contextmanager
def _service(rate: float) -> Iterator[tuple[Access, ServiceUrl, dict[str, int]]]:
    """A fake engine and a gateway in front of it, in a runtime folder of their own; pids by name."""
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kog-p-")))
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(root)}
        flags = [f"--rate={rate}", f"--instance={INSTANCE}", "--stamps"]
        engine = stack.enter_context(child_process("kog_dist.bench.cli", "replay", *flags, environment=environment))
        folder = root / "kog" / INSTANCE
        wait_ready(lambda: (folder / SOCKET_NAME).exists(), [engine], "the fake engine")
        access = Access.from_folder(folder)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        model, _ = model_folder(LaunchConfig())
        args = GatewayArgs(listener.fileno(), "127.0.0.1", instance_folder=str(folder), model=str(model))
        fds = (listener.fileno(),)
        gateway = stack.enter_context(
            child_process("kog_dist.gateway.process", args.to_json(), environment=environment, pass_fds=fds)
        )
        url = ServiceUrl.parse(f"http://127.0.0.1:{listener.getsockname()[1]}")
        wait_ready(lambda: asyncio.run(_is_ready(url)), [gateway], "the gateway")
        yield access, url, {"engine": engine.pid, "gateway": gateway.pid, "client": os.getpid()}


async def _is_ready(url: ServiceUrl) -> bool:
    async with LoadClient(url) as client:
        exchange = await client.get(f"{url.root}/readyz", 2.0)
    return exchange.response.status == 200


@contextlib.contextmanager
def _spent(sample: _Sample, pids: dict[str, int]) -> Iterator[None]:
    """Add the CPU time that the processes use in this block."""
    before = {name: _cpu_us(pid) for name, pid in pids.items()}
    yield
    for name, pid in pids.items():
        sample.cpu_us[name] = sample.cpu_us.get(name, 0.0) + _cpu_us(pid) - before[name]


def _cpu_us(pid: int) -> float:
    """User and system time of a process and all its threads so far; a tick is 10 ms."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / _TICKS_PER_S * 1e6
