"""A fake replica for `kog-bench router`, where everything but the router costs next to nothing.

Tokens come at the rate that the prompt names, and say when they were sent. It reads no text and checks nothing, unlike
`FakeEngine`, whose work would be measured with the router's. Prompts of token ids it keeps, as engines do, and takes time for
what it has not kept.

`python -m kog_dist.bench.fakes.fake_replica FOLDER KEPT_TOKENS US_PER_TOKEN`; it ends when its standard input closes.
"""

from __future__ import annotations

import os
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Final

import zmq

from kog_dist.router.affinity import IDS_BLOCK, ids_keys
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

IDS_RATE: Final = 1000  # tokens per second of answers to prompts of token ids
_TOKEN: Final = 7  # of all answers
_SPIN_NS: Final = 2_000_000  # a poll rounds to milliseconds


class KeptPrompts:
    """Blocks of the prompts that were answered last, at most so many tokens of them."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // IDS_BLOCK
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def num_cached(self, token_ids: Sequence[int]) -> int:
        """Tokens of the prompt's beginning that are kept."""
        return IDS_BLOCK * sum(1 for _ in takewhile(self._blocks.__contains__, ids_keys(token_ids)))

    def keep(self, token_ids: Sequence[int]) -> None:
        """Keep a prompt, or a prompt and its answer."""
        for key in reversed(ids_keys(token_ids)):  # its end goes first
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class FakeReplica:
    """One request at a time, as an engine has it. A prompt of text is the number of tokens per second."""

    def __init__(self, folder: Path, kept_tokens: int, us_per_token: int) -> None:
        self._kept, self._us_per_token = KeptPrompts(kept_tokens), us_per_token
        self._num_cached, self._prefill_ns = 0, 0
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
            if self._running is not None and self._next_ns - time.monotonic_ns() < _SPIN_NS:
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
            prompt = message.prompt_ids or ()
            self._num_cached = self._kept.num_cached(prompt)
            self._prefill_ns = 1000 * self._us_per_token * (len(prompt) - self._num_cached)
            self._running, self._index, self._next_ns = (peer, message), 0, time.monotonic_ns() + self._prefill_ns
            self._listener.send(peer, Accepted(message.request_id, 0, max(1, len(prompt)), message.max_tokens or 1))
        elif isinstance(message, Cancel):
            self._running = None

    def _emit(self, peer: bytes, request: Generate) -> None:
        now_ns = time.monotonic_ns()
        self._listener.send(peer, Tokens(request.request_id, self._index, (_TOKEN,), str(now_ns), ()))
        self._index += 1
        self._next_ns += round(1e9 / (IDS_RATE if request.prompt_ids else float(request.prompt or 1)))
        if self._index == request.max_tokens:
            self._running = None
            prompt = request.prompt_ids or ()
            self._kept.keep([*prompt, *[_TOKEN] * self._index])
            done = Done(request.request_id, FinishReason.LENGTH, max(1, len(prompt)), self._index, 0.0, 0.0)
            self._listener.send(peer, replace(done, num_cached_tokens=self._num_cached, prefill_s=self._prefill_ns / 1e9))


if __name__ == "__main__":
    FakeReplica(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])).run()
