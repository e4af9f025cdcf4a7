"""The fake engine: RPC as a coordinator speaks it, and tokens that come at a fixed rate from a text instead of a model.

It takes the place of coordinator and ranks: what is in front of an engine (gateway, clients, benchmarks) is measured and tested
with it. Behind a real coordinator stands `FakeRank`, behind a real router `FakeReplica`. Tokens are due on an absolute
schedule that starts with the request, so that a late wake-up delays one token and not those after it; what is due when the loop
comes by goes out in one event, as from a coordinator that was late.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Final

from kog_dist.bench.fakes.replay_script import ReplayScript, decoder_of
from kog_dist.errors import RequestError
from kog_dist.records import dataclass
from kog_dist.rpc.client_events import NOT_STARTED, Farewell
from kog_dist.rpc.counters import Counters
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.messages import (
    Cancel,
    Drain,
    EngineState,
    ErrorCode,
    FinishReason,
    Generate,
    Hello,
    Request,
    Status,
    StatusReport,
    Welcome,
    build_hash,
)
from kog_dist.runtime.wait import sleep_precisely
from kog_dist.workers.coordinator.client_events import StreamEvents
from kog_dist.workers.coordinator.model_folder import ModelFolder
from kog_dist.workers.coordinator.streams import RequestStream

QUEUE_LIMIT: Final = 64
_TOKENS_PER_EVENT = 256
_MESSAGES_PER_TURN = 16
_IDLE_WAIT_S = 0.05
_FAREWELL_S = 0.25


@dataclass(frozen=True, slots=True)
class FakeEngineSettings:
    """How the fake engine behaves. `prefill_s`: from the start of a request to its first token."""

    instance: str
    rate: float  # tokens per second of each request
    num_ranks: int = 1
    max_running: int = 1  # requests that are answered at the same time; the others wait
    prefill_s: float = 0.0
    stamps: bool = False  # the text of each token is the moment at which it is sent
    drain_s: float = 10.0


class _Replay:
    """A request that is being answered."""

    def __init__(self, stream: RequestStream, settings: FakeEngineSettings, now_ns: int) -> None:
        self.stream = stream
        self._first_ns = now_ns + round(settings.prefill_s * 1e9)
        self._gap_ns = 1e9 / settings.rate
        stream.timings.submitted(now_ns)

    def due_ns(self) -> int:
        """When its next token is due."""
        return self._first_ns + round(self.stream.num_tokens * self._gap_ns)

    def num_due(self, now_ns: int) -> int:
        """Tokens to send now."""
        if now_ns < self._first_ns:
            return 0
        total = min(int((now_ns - self._first_ns) / self._gap_ns) + 1, self.stream.request.max_tokens)
        return min(max(total - self.stream.num_tokens, int(now_ns >= self.due_ns())), _TOKENS_PER_EVENT)


class _OpenReplays:
    """The requests that are not finished: those that are being answered, and those that wait for that."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self.running: list[_Replay] = []
        self.waiting: deque[RequestStream] = deque()

    def __iter__(self) -> Iterator[RequestStream]:
        """In the order of their arrival; any of them may be removed meanwhile."""
        return iter([*(replay.stream for replay in self.running), *self.waiting])

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def find(self, request_id: str) -> RequestStream | None:
        """See `OpenRequestBook`."""
        return next((stream for stream in self if stream.request_id == request_id), None)

    def of_client(self, peer: bytes) -> list[RequestStream]:
        """See `OpenRequestBook`."""
        return [stream for stream in self if stream.peer == peer]

    def remove(self, stream: RequestStream) -> bool:
        """See `OpenRequestBook`."""
        num_before = len(self)
        self.running = [replay for replay in self.running if replay.stream is not stream]
        self.waiting = deque(waiting for waiting in self.waiting if waiting is not stream)
        return len(self) < num_before

    def position(self, stream: RequestStream) -> int:
        """How many requests stand before it; 0 when it runs or is next."""
        num_free = self._max_running - len(self.running)
        return max(0, self.waiting.index(stream) + 1 - num_free) if stream in self.waiting else 0


class FakeEngine:
    """Queue, running requests and their clients; `turn` does what there is to do without blocking, `run` repeats it."""

    def __init__(
        self,
        settings: FakeEngineSettings,
        model: ModelFolder,
        script: ReplayScript,
        listener: RpcListener,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`clock`: nanoseconds of CLOCK_MONOTONIC, which clients on this machine share."""
        self._settings, self._model, self._script, self._listener, self._clock = settings, model, script, listener, clock
        self._requests = _OpenReplays(settings.max_running)
        self._begin_ns = clock()
        self._drain_until_ns: int | None = None
        self.counters = Counters()
        self._clients = StreamEvents("engine", listener, self._requests, self.counters, clock)
        self.num_stop_signals = 0

    # ---- the loop ----
    def run(self, wakeup_fd: int = -1) -> None:
        """Serve until drained, or stopped by a second signal. `wakeup_fd` becomes readable on a signal."""
        sleep_precisely()
        wake_fds = [fd for fd in (*self._listener.fds, wakeup_fd) if fd >= 0]
        while not self._is_over():
            self.turn()
            self._sleep(wake_fds, wakeup_fd)
        farewell = Farewell.drained(self._settings.drain_s, is_cut=bool(self._requests))
        for stream in self._requests:
            self._clients.fail(stream, farewell.code, farewell.message)
        self._listener.close(_FAREWELL_S)

    def turn(self) -> None:
        """One round: messages, tokens that are due, the next requests, clients that are slow or gone."""
        for peer, message in self._listener.receive(_MESSAGES_PER_TURN):
            self._answer(peer, message)
        if self.num_stop_signals:
            self._begin_drain()
        self._start_next()
        for replay in tuple(self._requests.running):
            self._send_due(replay)
        for stream in self._requests:
            self._clients.tell_position(stream, self._requests.position(stream))
        self._clients.flush()

    def _sleep(self, wake_fds: Sequence[int], wakeup_fd: int) -> None:
        """Until the next token is due, a client says something or a signal comes."""
        if self._listener.has_input() or self._is_over():
            return
        due_ns = min((replay.due_ns() for replay in self._requests.running), default=None)
        wait_s = _IDLE_WAIT_S if due_ns is None else (due_ns - self._clock()) / 1e9
        if wakeup_fd in select.select(wake_fds, [], [], min(max(0.0, wait_s), _IDLE_WAIT_S))[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup_fd, 512)

    def _is_over(self) -> bool:
        if self.num_stop_signals > 1:
            return True
        if self._drain_until_ns is None:
            return False
        is_idle = not self._requests and not self._listener.has_backlog
        return is_idle or self._clock() >= self._drain_until_ns

    def _begin_drain(self) -> None:
        if self._drain_until_ns is None:
            self._drain_until_ns = self._clock() + round(self._settings.drain_s * 1e9)
            for stream in tuple(self._requests.waiting):
                self._clients.fail(stream, ErrorCode.DRAINING, NOT_STARTED)

    # ---- messages ----
    def _answer(self, peer: bytes, message: Request) -> None:
        match message:
            case Generate():
                self._take_request(peer, message)
            case Cancel():
                if (stream := self._clients.to_cancel(peer, message.request_id)) is not None:
                    self._clients.finish(stream, FinishReason.CANCELLED)
                    if peer != stream.peer:
                        self._listener.send(peer, self._report())
            case Hello():
                self._listener.send(peer, self._welcome())
            case Status():
                self._listener.send(peer, self._report())
            case Drain():
                self._begin_drain()
                self._listener.send(peer, self._report())

    def _take_request(self, peer: bytes, message: Generate) -> None:
        try:
            self._check_room(message)
            request = self._model.admit(message)
            decoder = decoder_of(self._model.tokenizer, request.prompt, stamps=self._settings.stamps)
        except RequestError as error:
            self._clients.refuse(peer, message.request_id, error)
            return
        stream = RequestStream(peer, message, request, decoder, self._clock())
        self._requests.waiting.append(stream)
        self._clients.accept(stream, self._requests.position(stream))

    def _check_room(self, message: Generate) -> None:
        self._clients.check_new(message.request_id, is_draining=self._drain_until_ns is not None)
        if message.constraints or message.thought_end is not None:
            reason = "the fake engine replays a text and follows no grammar; ask a real engine"
            raise RequestError(ErrorCode.INVALID_CONSTRAINT, reason)
        if len(self._requests.waiting) >= QUEUE_LIMIT:
            raise RequestError(ErrorCode.QUEUE_FULL, f"{QUEUE_LIMIT} requests are waiting already; try again in about 1 s", 1.0)

    def _welcome(self) -> Welcome:
        spec, has_tokenizer = self._model.spec, self._model.tokenizer is not None
        return Welcome(
            build_hash(),
            self._settings.instance,
            self._model.name,
            self._state(),
            self._settings.num_ranks,
            spec.max_context,
            spec.vocab_size,
            has_tokenizer,
        )

    def _report(self) -> StatusReport:
        num_ranks = self._settings.num_ranks
        running = self._requests.running[0].stream if self._requests.running else None
        num_prompt = len(running.request.prompt) if running is not None else 0
        return StatusReport(
            state=self._state(), instance=self._settings.instance, model=self._model.name, build=build_hash(), pid=os.getpid(),
            world_size=num_ranks, rank_states=("running" if running is not None else "ready",) * num_ranks,
            beat_ages_s=(0.0,) * num_ranks, rank_places=tuple("a fake rank" for _ in range(num_ranks)),
            uptime_s=(self._clock() - self._begin_ns) / 1e9, running=None if running is None else running.request_id,
            waiting=tuple(stream.request_id for stream in self._requests.waiting), queue_limit=QUEUE_LIMIT,
            client_queue_limit=QUEUE_LIMIT, running_prompt_tokens=num_prompt,
            running_position=0 if running is None else num_prompt + running.num_tokens,
            num_bad_messages=self._listener.num_bad_messages, **asdict(self.counters),
        )  # fmt: skip

    def _state(self) -> EngineState:
        return EngineState.READY if self._drain_until_ns is None else EngineState.DRAINING

    # ---- tokens ----
    def _start_next(self) -> None:
        requests = self._requests
        while requests.waiting and len(requests.running) < self._settings.max_running:
            requests.running.append(_Replay(requests.waiting.popleft(), self._settings, self._clock()))

    def _send_due(self, replay: _Replay) -> None:
        stream, now_ns = replay.stream, self._clock()
        if stream.deadline_ns is not None and now_ns >= stream.deadline_ns:
            self._clients.finish(stream, FinishReason.DEADLINE)
            return
        num_due = replay.num_due(now_ns)
        if not num_due:
            return
        request, first = stream.request, stream.num_tokens
        event, reason = stream.take(
            [
                self._script.entry(
                    index,
                    now_ns,
                    max_tokens=request.max_tokens,
                    ignore_eos=request.ignore_eos,
                    num_logprobs=request.sampling.logprobs,
                )
                for index in range(first, min(first + num_due, request.max_tokens))
            ]
        )
        if event is not None:
            self.counters.num_tokens += len(event.token_ids)
            if not self._clients.send(stream, event):
                return
        if reason is not None:
            self._clients.finish(stream, reason)


def with_context(model: ModelFolder, max_context: int) -> ModelFolder:
    """The same model with room for longer answers: no KV cache limits a replay."""
    return replace(model, spec=replace(model.spec, max_context=max_context))
