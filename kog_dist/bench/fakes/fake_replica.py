"""A fake replica for `kog-bench router`, where everything but the router costs next to nothing.

Tokens come at the rate that the prompt names, and say when they were sent. It reads no text and checks nothing, unlike
`FakeEngine`, whose work would be measured with the router's.

`python -m kog_dist.bench.fakes.fake_replica FOLDER`; it ends when its standard input closes.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import zmq

from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.messages import (
    Accepted,
    Cancel,
    Done,
    EngineState,
    FinishReason,
    Generate,
    Hello,
    Request,
    Status,
    StatusReport,
    Tokens,
    Welcome,
    build_hash,
)


class FakeReplica:
    """One request at a time, as an engine has it. The prompt is the number of tokens per second."""

    def __init__(self, folder: Path) -> None:
        self._listener = RpcListener(folder)
        self._poller = zmq.Poller()
        for socket in self._listener.sockets():
            self._poller.register(socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._running: tuple[bytes, Generate] | None = None
        self._index, self._next_ns = 0, 0

    def run(self) -> None:
        """Serve until standard input closes."""
        while True:
            wait_ns = max(0, self._next_ns - time.monotonic_ns()) if self._running is not None else 50_000_000
            ready = dict(self._poller.poll(wait_ns // 1_000_000))
            if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
                self._listener.close()
                return
            for peer, message in self._listener.receive(16):
                self._answer(peer, message)
            if self._running is not None:
                while time.monotonic_ns() < self._next_ns:
                    pass  # the kernel's sleep is too coarse for the rates that are asked for
                self._emit(*self._running)
            self._listener.flush()

    def _answer(self, peer: bytes, message: Request) -> None:
        if isinstance(message, Hello):
            self._listener.send(peer, Welcome(build_hash(), "source", "source", EngineState.READY, 1, 1 << 20, 1 << 10, True))
        elif isinstance(message, Status):
            running = self._running[1].request_id if self._running is not None else None
            self._listener.send(
                peer,
                StatusReport(
                    EngineState.READY, "source", "source", build_hash(), os.getpid(), 1, ("ready",), (0.0,), 0.0, running, (), 1,
                    0, 0, 0, 0, 0, 0, 0,
                ),
            )  # fmt: skip
        elif isinstance(message, Generate):
            self._running, self._index, self._next_ns = (peer, message), 0, time.monotonic_ns()
            self._listener.send(peer, Accepted(message.request_id, 0, 1, message.max_tokens or 1))
        elif isinstance(message, Cancel):
            self._running = None

    def _emit(self, peer: bytes, request: Generate) -> None:
        now_ns = time.monotonic_ns()
        self._listener.send(peer, Tokens(request.request_id, self._index, (7,), str(now_ns), ()))
        self._index += 1
        self._next_ns += round(1e9 / float(request.prompt or 1))
        if self._index == request.max_tokens:
            self._running = None
            self._listener.send(peer, Done(request.request_id, FinishReason.LENGTH, 1, self._index, 0.0, 0.0))


if __name__ == "__main__":
    FakeReplica(Path(sys.argv[1])).run()
