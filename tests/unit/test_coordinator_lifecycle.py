"""Requests, clients, ranks and stops in any order: every answer is an exact prefix and has exactly one terminal event.

The coordinator's loop is turned by hand; ranks and clients act between turns, so each run is one interleaving, without clocks.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Drain,
    Error,
    Event,
    FinishReason,
    Generate,
    PrefillProgress,
    Tokens,
)
from kog_dist.runtime.control import AbortCause
from tests.unit.hand_turned import PEERS, HandTurned, Letters, answer_of

OUTBOX = 12
RARELY = st.integers(0, 40).map(lambda number: number == 23)


class Lifecycle(RuleBasedStateMachine):
    """One engine and three clients."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = HandTurned(queue_limit=4, client_queue_limit=3)
        self.engine.texts.longest_at_once = 3
        self.wire, self.control, self.coordinator = self.engine.wire, self.engine.control, self.engine.coordinator
        self.sent: dict[str, tuple[bytes, Generate]] = {}
        self.is_over = False

    @initialize(is_ready=st.sampled_from([True, True, False]))
    def start(self, is_ready: bool) -> None:
        if is_ready:
            self.ranks_become_ready()

    # ---- ranks ----
    @rule()
    def ranks_become_ready(self) -> None:
        self.engine.ranks.become_ready()

    @rule(num_tokens=st.integers(1, 8), is_faulty=RARELY)
    def rank_0_decodes(self, num_tokens: int, is_faulty: bool) -> None:
        self.engine.ranks.decode(num_tokens, is_faulty=is_faulty)

    @rule(milliseconds=st.sampled_from([1, 60, 300]))
    def time_passes(self, milliseconds: int) -> None:
        self.engine.pass_ms(milliseconds)

    @rule()
    def a_long_text_is_read(self) -> None:
        self.engine.texts.read()

    # ---- clients ----
    @rule(
        peer=st.sampled_from(PEERS), prompt=st.text("ab", max_size=6), max_tokens=st.none() | st.integers(1, 20),
        stop=st.lists(st.text("ab", min_size=2, max_size=5), max_size=2), ignore_eos=st.booleans(),
        deadline_s=st.none() | st.sampled_from([0.05, 0.5]),
    )  # fmt: skip
    def client_asks(
        self, peer: bytes, prompt: str, max_tokens: int | None, stop: list[str], ignore_eos: bool, deadline_s: float | None
    ) -> None:
        if peer not in self.wire.gone:
            request_id = f"r{len(self.sent)}"
            message = Generate(
                request_id, prompt, None, max_tokens, stop=tuple(stop), ignore_eos=ignore_eos, deadline_s=deadline_s
            )
            self.sent[request_id] = (peer, message)
            self.wire.inbox.append((peer, message))

    @rule(peer=st.sampled_from(PEERS), number=st.integers(0, 5), is_running=st.booleans())
    def client_cancels(self, peer: bytes, number: int, is_running: bool) -> None:
        running = [stream.request_id for stream in self.coordinator.requests.running.values()]
        request_id = running[0] if running and is_running else f"r{number}"
        if peer not in self.wire.gone:
            self.wire.inbox.append((peer, Cancel(request_id)))

    @rule(peer=st.sampled_from(PEERS[1:]))
    def client_vanishes(self, peer: bytes) -> None:
        self.wire.gone.add(peer)

    @rule(peer=st.sampled_from(PEERS[1:]))
    def client_stops_reading(self, peer: bytes) -> None:
        self.wire.room[peer] = min(self.wire.room[peer], OUTBOX)

    # ---- the coordinator ----
    @rule(num_turns=st.integers(1, 3))
    @precondition(lambda self: not self.is_over)
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.coordinator.turn()
            if self.coordinator._farewell is not None:
                self._end()
                return

    @rule(num_steps=st.integers(1, 12))
    @precondition(lambda self: not self.is_over)
    def token_by_token(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self.is_over:
                self.rank_0_decodes(num_tokens=1, is_faulty=False)
                self.turn(num_turns=1)

    @rule(peer=st.sampled_from(PEERS), how=st.sampled_from(["verb", "page"]), now=RARELY)
    def drain(self, peer: bytes, how: str, now: bool) -> None:
        if now and how == "verb" and peer not in self.wire.gone:
            self.wire.inbox.append((peer, Drain()))
        elif now:
            self.control.set_drain()

    @rule(cause=st.sampled_from([AbortCause.RANK_DIED, AbortCause.SHUTDOWN]), now=RARELY)
    def abort(self, cause: AbortCause, now: bool) -> None:
        if now:
            self.control.set_abort(cause, 1)

    def _end(self) -> None:
        self.coordinator.run()
        self.is_over = True

    # ---- what must hold ----
    def _events_of(self, request_id: str) -> list[Any]:
        peer, _ = self.sent[request_id]
        return [event for event in self.wire.delivered[peer] if getattr(event, "request_id", None) == request_id]

    @invariant()
    def every_stream_is_an_exact_prefix_with_at_most_one_end(self) -> None:
        for request_id, (_, message) in self.sent.items():
            events = [
                e for e in self._events_of(request_id) if not isinstance(e, Alive | PrefillProgress) and not _is_cancel_refusal(e)
            ]
            if not events:
                continue
            ends = [event for event in events if isinstance(event, Done | Error)]
            assert len(ends) <= 1
            assert not ends or events[-1] is ends[0], "nothing follows the terminal event"
            assert isinstance(events[0], Accepted) or (len(events) == 1 and _ends_unaccepted(events[0]))
            self._check_answer(message, [event for event in events if isinstance(event, Tokens)], events[-1])

    @invariant()
    def every_request_is_counted_once(self) -> None:
        counters, waiting = self.coordinator.counters, self.coordinator.requests
        num_ended = counters.num_completed + counters.num_cancelled + counters.num_expired + counters.num_failed
        unread = [message for _, message in self.wire.inbox if isinstance(message, Generate)]
        assert num_ended + counters.num_refused + len(waiting) == len(self.sent) - len(unread)

    def _check_answer(self, message: Generate, tokens: list[Tokens], last: Event) -> None:
        if message.prompt is None or not tokens:
            return
        expected = answer_of(Letters().encode(message.prompt))
        ids = [token_id for event in tokens for token_id in event.token_ids]
        assert ids == expected[: len(ids)]
        text = "".join(event.text for event in tokens)
        whole = "".join(map(Letters().push, ids))
        assert whole.startswith(text)
        assert not any(stop in text for stop in message.stop)
        if isinstance(last, Done) and last.finish_reason is not FinishReason.STOP:
            assert text == whole, "text that was withheld is delivered at the end"
        if isinstance(last, Done):
            assert last.num_generated_tokens == len(ids)

    def teardown(self) -> None:
        if not self.is_over:
            self.control.set_abort(AbortCause.RANK_DIED, 0)
            self._end()
            self.every_stream_is_an_exact_prefix_with_at_most_one_end()
        unread = {request.request_id for _, request in self.wire.inbox if isinstance(request, Generate)}
        for request_id, (peer, _) in self.sent.items():
            if request_id in unread or peer in self.wire.gone or self.wire.room[peer] < 10**6:
                continue  # never read by the coordinator, or nobody is there to be told
            ends = [e for e in self._events_of(request_id) if isinstance(e, Done | Error) and not _is_cancel_refusal(e)]
            assert len(ends) == 1, f"request {request_id} has {len(ends)} terminal events"
        self.engine.close()


def _ends_unaccepted(event: Event) -> bool:
    """Refused, or cancelled while its text was still to be read."""
    return isinstance(event, Error) or (isinstance(event, Done) and event.finish_reason is FinishReason.CANCELLED)


def _is_cancel_refusal(event: Event) -> bool:
    return isinstance(event, Error) and event.code == "unknown_request"


TestLifecycle = Lifecycle.TestCase
TestLifecycle.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
