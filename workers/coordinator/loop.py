"""What the coordinator does: RPC on one side, the control page and the token ring on the other.

One thread, one loop. Ranks never see text; clients never see a token that was not read from the ring; every accepted request ends
in exactly one terminal event.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

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
    PrefillProgress,
    Request,
    Status,
    StatusReport,
)
from kog_dist.runtime.control import COORDINATOR, ControlPage
from kog_dist.runtime.ring import Finish, TokenEntry
from kog_dist.workers.coordinator.admission import Admission
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.client_events import StreamEvents
from kog_dist.workers.coordinator.decode_slot import DecodeSlot, DecodeSlots
from kog_dist.workers.coordinator.engine_life import EngineLife
from kog_dist.workers.coordinator.model_folder import ModelFolder
from kog_dist.workers.coordinator.open_requests import OpenRequests
from kog_dist.workers.coordinator.prompt_scoring import PromptScoring
from kog_dist.workers.coordinator.reports import status_report, welcome
from kog_dist.workers.coordinator.request_queue import RequestQueue
from kog_dist.workers.coordinator.streams import RequestStream
from kog_dist.workers.coordinator.text_reader import TextReader
from kog_dist.workers.grammar.service import GrammarService

ROUSE_EVERY_NS = 10_000_000
PREFILL_EVERY_NS = 100_000_000
FAREWELL_S = 0.25  # for the last events, once the loop has ended
_TOKEN_WAIT_S = 0.01  # longest wait while ranks decode (a token ends it at once, a message within 1 ms): bounds an abort's delay
_QUEUE_WAIT_S = 0.01  # the same while a request waits for ranks that load, or for a client that does not read
_IDLE_WAIT_S = 0.05
_LARGE_VOCABULARY = 1 << 15  # ids; a smaller one is read in 0.3 s, which is not worth the memory of two processes
_SPARE_AFTER_NS = 1_000_000_000  # of being ready and idle: whoever has waited for the start comes first
_DAMAGED = "the weights or the device are damaged"
_MESSAGES_PER_TURN = 16  # so that a flood of messages does not hold up tokens


class Coordinator:
    """Queue, running requests and their clients. `turn` does what there is to do without blocking; `run` repeats it."""

    def __init__(
        self,
        args: CoordinatorArgs,
        control: ControlPage,
        model: ModelFolder,
        listener: RpcListener,
        *,
        supervisor_fd: int = -1,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`supervisor_fd`: a pidfd, readable when the supervisor is dead; -1: none. `clock`: nanoseconds, as ranks' stamps."""
        self._args = args
        self._control = control
        self._model = model
        self._listener = listener
        self._clock = clock
        self._life = EngineLife(args, control, supervisor_fd)
        window = model.spec.sliding_window if model.spec.window_layers else None
        self._slots = DecodeSlots(control, window, is_recurrent=model.spec.is_recurrent)
        self._grammars: GrammarService[RequestStream] = GrammarService(model.folder, control)
        self._texts: TextReader[RequestStream] = TextReader()
        queue = RequestQueue(args.queue_limit, args.client_queue_limit)
        self.requests = OpenRequests(queue, self._grammars, self._texts, clock)
        self.counters = Counters()
        self._clients = StreamEvents("engine", listener, self.requests, self.counters, clock)
        self._admission = Admission(
            model,
            self.requests,
            self._grammars,
            self._texts,
            self._clients,
            clock,
            is_draining=lambda: self._life.draining,
            start_next=self._start_next,
        )
        self._farewell: Farewell | None = None
        self._begin_ns = clock()
        self._wake_fds = [fd for fd in (*listener.fds, supervisor_fd) if fd >= 0]
        self._roused_ns = 0
        self._prepares_grammars = model.tokenizer is not None and model.spec.vocab_size >= _LARGE_VOCABULARY
        self._idle_since_ns = 0  # for the first time

    # ---- the loop ----
    def run(self) -> int:
        """Serve until drained, aborted or orphaned. Returns the exit code."""
        self._texts.start()
        while self._farewell is None:
            self.turn()
            self._sleep()
        return self._say_farewell(self._farewell)

    def turn(self) -> None:
        """One round: tokens, which somebody waits for, messages, the engine's state, the next request, clients that are slow."""
        self._control.beat(COORDINATOR)
        self._read_tokens()
        received_ns = self._clock()
        for peer, message in self._listener.receive(_MESSAGES_PER_TURN, self._rouse_ranks):
            self._answer(peer, message, received_ns)
        self._accept_checked()
        self._end_expired()
        self._start_next()  # before a drain is noticed: what was accepted with nothing before it counts as running
        self._look_after_engine()
        self._tell_where_requests_are()
        self._clients.flush()

    def _rouse_ranks(self) -> None:
        """Idle ranks wake while a request is read; seldom enough that requests which are refused keep no core busy."""
        now_ns = self._clock()
        if not self._slots.busy and now_ns - self._roused_ns >= ROUSE_EVERY_NS:
            self._roused_ns = now_ns
            self._control.rouse()

    def _sleep(self) -> None:
        if self._farewell is not None or self._listener.has_input():
            return
        if self._slots.busy:
            self._slots.wait(_TOKEN_WAIT_S, lambda: self._listener.has_input() or self._texts.has_answer())
            return
        self._prepare_grammars()
        timeout_s = _QUEUE_WAIT_S if len(self.requests.queue) or self._listener.has_backlog else _IDLE_WAIT_S
        select.select([*self._wake_fds, *self._grammars.fds, *self._texts.fds], [], [], timeout_s)

    def _prepare_grammars(self) -> None:
        """While there is nothing else to do: the first grammar of a large vocabulary would wait for it, seconds."""
        if not self._prepares_grammars or len(self.requests.queue) or not self._life.is_ready():
            return
        now_ns = self._clock()
        self._idle_since_ns = self._idle_since_ns or now_ns
        if now_ns - self._idle_since_ns >= _SPARE_AFTER_NS:
            self._prepares_grammars = self._grammars.start_ahead()

    def _say_farewell(self, farewell: Farewell) -> int:
        for stream in self.requests:
            self._clients.fail(stream, farewell.code, farewell.message)
        self._grammars.close()
        self._listener.close(FAREWELL_S)
        self._texts.close()
        return farewell.exit_code

    # ---- messages ----
    def _answer(self, peer: bytes, message: Request, received_ns: int) -> None:
        match message:
            case Generate():
                self._admission.take(peer, message, received_ns)
            case Cancel():
                if (stream := self._clients.to_cancel(peer, message.request_id)) is not None:
                    self._clients.finish(stream, FinishReason.CANCELLED)
                    if peer != stream.peer:
                        self._listener.send(peer, self._report())
            case Hello():
                self._listener.send(peer, welcome(self._args, self._control, self._model, self.state))
            case Status():
                self._listener.send(peer, self._report())
            case Drain():
                self._begin_drain()
                self._listener.send(peer, self._report())

    def _report(self) -> StatusReport:
        return status_report(
            self._args,
            self._control,
            self._model,
            self.state,
            self.requests,
            self._slots,
            self.counters,
            uptime_s=(self._clock() - self._begin_ns) / 1e9,
            num_bad_messages=self._listener.num_bad_messages,
        )

    def _accept_checked(self) -> None:
        running = {slot.number: stream for slot, stream in self.requests.running.items()}  # none that this starts
        followed = [(self._grammars.runners[number], stream) for number, stream in running.items()]
        num_lost = [runner.num_lost for runner, _ in followed]
        for runner in self._grammars.runners:
            stream = running.get(runner.slot)
            runner.wants(None if stream is None else stream.next_mask)
        self._admission.go_on()
        for (runner, stream), num_before in zip(followed, num_lost, strict=True):
            if runner.num_lost != num_before and stream.constraint is not None and self.requests.slot_of(stream) is not None:
                message = f"the process that followed {stream.constraint.kind} {runner.loss}; try again"
                self._clients.fail(stream, ErrorCode.CONSTRAINT_FAILED, message)

    # ---- tokens ----
    def _start_next(self) -> None:
        for slot, scored in self.requests.running.items():
            if scored.scoring is not None and scored.scoring.is_done and slot in self._slots.free():
                scored.scoring = None
                # Behind the prompt, of which nothing was cached before.
                self._slots.submit(slot, scored.request, reuse_kv=True, scope=scored.cache_salt)
        while len(self.requests.queue) and self._farewell is None and self._life.is_ready():
            free = [slot for slot in self._slots.free() if slot not in self.requests.running]
            stream = next(filter(self._may_begin, self.requests.queue), None) if free else None
            if stream is None:
                return
            self.requests.queue.take(stream)
            slot = self._fitting(free, stream)
            self.requests.running[slot] = stream
            stream.timings.submitted(self._clock())
            if stream.wants_scores:
                self._score_prompt(slot, stream)
            else:
                self._decode(slot, stream)
            stream.timings.stage("submitted", slot.submitted_ns)

    def _may_begin(self, stream: RequestStream) -> bool:
        """Whether it would not be sooner done behind what a running request reads."""
        may_wait = stream.reuses_kv and not stream.wants_scores
        return not (may_wait and self._slots.is_being_read(stream.request.prompt, stream.cache_salt, stream.commons))

    def _fitting(self, free: Sequence[DecodeSlot], stream: RequestStream) -> DecodeSlot:
        """One that has a process for masks, where there is a grammar, else one that has none."""
        has_grammar = stream.constraint is not None
        runners = self._grammars.runners
        return min(free, key=lambda slot: runners[slot.number].is_up != has_grammar)

    def _decode(self, slot: DecodeSlot, stream: RequestStream) -> None:
        request, constraint = stream.request, stream.constraint
        if constraint is not None:
            request = replace(request, mask_epoch=self._grammars.reserve_epochs(request.max_tokens))
        recalls = stream.reuses_kv and self._model.recalls(stream.speculate)
        stream.request = self._slots.submit(slot, request, reuse_kv=stream.reuses_kv, scope=stream.cache_salt, recalls=recalls)
        if constraint is not None and slot.seq is not None:
            self._grammars.runners[slot.number].run(slot.seq, request.mask_epoch, constraint, drafts=request.drafts)

    def _score_prompt(self, slot: DecodeSlot, stream: RequestStream) -> None:
        prompt, num_top = stream.request.prompt, stream.request.sampling.logprobs
        assert num_top is not None, "a Generate message that wants them says how many"
        epoch = self._grammars.reserve_epochs(len(prompt) - 1)
        stream.scoring = PromptScoring(prompt, num_top, self._control.mask_slots[slot.number], epoch)
        stream.scoring.write_masks()
        self._slots.submit(slot, stream.scoring.request, reuse_kv=False, scope=stream.cache_salt)

    def _read_scores(self, stream: RequestStream, scoring: PromptScoring, entries: Sequence[TokenEntry]) -> None:
        """Log-probabilities of the prompt; the answer begins in `_start_next`."""
        event, finish = scoring.take(stream.request_id, entries) if entries else (None, Finish.NONE)
        if event is not None and not self._clients.send(stream, event):
            return
        if finish is Finish.NONE:
            scoring.write_masks()
        elif finish is Finish.LENGTH and not stream.request.max_tokens:
            self._clients.finish(stream, FinishReason.LENGTH)
        elif finish is Finish.NUMERICAL_FAULT:
            message = f"the logits before token {1 + scoring.num_taken} of the prompt are not finite; {_DAMAGED}"
            self._clients.fail(stream, ErrorCode.NUMERICAL_FAULT, message)
        elif finish is not Finish.LENGTH:
            message = f"the ranks were not told of token {1 + scoring.num_taken} of the prompt in time; send the request again"
            self._clients.fail(stream, ErrorCode.INTERNAL_ERROR, message)

    def _read_tokens(self) -> None:
        for slot in self._slots.slots:
            self._read_tokens_of(slot)
        self._slots.copy()

    def _read_tokens_of(self, slot: DecodeSlot) -> None:
        entries, stream = slot.read(), self.requests.running.get(slot)
        if stream is not None and stream.scoring is not None and not stream.scoring.is_done:
            self._read_scores(stream, stream.scoring, entries)
            return
        if stream is None or not entries:
            return
        is_first, taken_ns = not stream.num_tokens, self._clock()
        faulty = entries[-1].finish in (Finish.NUMERICAL_FAULT, Finish.NO_MASK)
        event, reason = stream.take(entries[:-1] if faulty else entries)
        if event is not None:
            self.counters.num_tokens += len(event.token_ids)
            if not self._clients.send(stream, event):
                return
            if is_first:
                stream.timings.first_token(taken_ns, self._clock(), slot.stages_ns())
        if reason is not None:
            self._clients.finish(stream, reason)
        elif entries[-1].finish is Finish.NO_MASK:
            kind = stream.constraint.kind if stream.constraint is not None else "grammar"
            message = f"{kind} is too complex: nothing could be said of what may follow token {stream.num_tokens}; simplify it"
            self._clients.fail(stream, ErrorCode.CONSTRAINT_FAILED, message)
        elif faulty:
            self._clients.fail(
                stream,
                ErrorCode.NUMERICAL_FAULT,
                f"the logits of token {stream.num_tokens} are not finite; {_DAMAGED}",
            )

    # ---- ends of a request ----
    def _end_expired(self) -> None:
        now_ns = self._clock()
        for stream in self.requests:
            if stream.deadline_ns is None or now_ns < stream.deadline_ns:
                continue
            if self.requests.slot_of(stream) is not None:
                self._clients.finish(stream, FinishReason.DEADLINE)
            else:
                waited_s = stream.timings.since_reception_s(now_ns)
                message = f"the request's own time limit passed while it was waiting, {waited_s:.3f} s after its reception"
                self._clients.fail(stream, ErrorCode.DEADLINE_EXCEEDED, message)

    def _tell_where_requests_are(self) -> None:
        """Changed places in the queue, progress of the prefill, a word after a silence; finds out which clients are gone."""
        now_ns = self._clock()
        for position, stream in enumerate(self.requests):
            slot = self.requests.slot_of(stream)
            is_due = now_ns - stream.last_sent_ns >= PREFILL_EVERY_NS and not self._listener.is_behind(stream.peer)
            if slot is not None and not stream.num_tokens and is_due:
                self._clients.send(stream, PrefillProgress(stream.request_id, slot.position, len(stream.request.prompt)))
            else:
                self._clients.tell_position(stream, position if slot is None else 0)

    # ---- the engine ----
    @property
    def state(self) -> EngineState:
        """What the engine can do now."""
        return EngineState.FAILED if self._farewell is not None else self._life.state

    def _look_after_engine(self) -> None:
        self._farewell = self._why_end()
        if self._farewell is None and not self._life.draining and self._control.draining():
            self._begin_drain()
            self._farewell = self._why_end()
        if self._farewell is None and (fault := self._life.fault()) is not None:
            for stream in self.requests:
                self._clients.fail(stream, ErrorCode.RANK_FAILED, fault)

    def _why_end(self) -> Farewell | None:
        is_running = bool(self.requests.running)
        is_idle = not is_running and not self._listener.has_backlog
        return self._life.farewell(is_running=is_running, is_idle=is_idle)

    def _begin_drain(self) -> None:
        self._control.set_drain()  # a rank that is lost now is no reason to start again
        self._life.drain()
        for stream in self.requests.not_running():
            self._clients.fail(stream, ErrorCode.DRAINING, NOT_STARTED)
