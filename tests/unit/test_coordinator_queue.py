"""What clients are told of the queue, of time limits, of the prefill, and of what was cached. The clock is moved by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kog_dist.decode.request import KvUse
from kog_dist.rpc.listener import Delivery
from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Drain,
    Error,
    ErrorCode,
    Event,
    FinishReason,
    PrefillProgress,
    Status,
    StatusReport,
    Tokens,
)
from kog_dist.rpc.shown import describe
from kog_dist.runtime.control import AbortCause
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.grammar.service import Verdict
from tests.unit.hand_turned import CONTEXT, PEERS, HandTurned, Letters, answer_of

A, B, C = PEERS
WORD = "aab"  # an answer of nine tokens follows


def positions(engine: HandTurned, request_id: str) -> list[int]:
    return [event.queue_position for event in engine.events(request_id) if isinstance(event, Accepted | Alive)]


def last(engine: HandTurned, request_id: str) -> Any:
    return engine.events(request_id)[-1]


def status(engine: HandTurned) -> StatusReport:
    return engine.coordinator._report()


def test_the_status_names_the_models_own_sampling(engine: HandTurned) -> None:
    assert "sampling greedy by default over HTTP" in describe(status(engine))
    own = SamplingParams(temperature=0.5, top_k=3)
    engine.coordinator._model = replace(engine.coordinator._model, own_sampling=own)
    assert status(engine).own_sampling == "temperature 0.5, top_k 3"


# ---- the queue ----
def test_positions_are_told_when_they_change(engine: HandTurned) -> None:
    for peer, name in ((A, "a1"), (A, "a2"), (A, "a3"), (B, "b1")):
        engine.ask(peer, name, max_tokens=1)
    assert [positions(engine, name) for name in ("a1", "a2", "a3", "b1")] == [[0], [1, 2], [2, 3], [1]]
    assert status(engine).waiting == ("b1", "a2", "a3"), "connections take turns"
    before = [len(engine.events(name)) for name in ("a2", "b1")]
    engine.coordinator.turn()
    assert [len(engine.events(name)) for name in ("a2", "b1")] == before, "nothing changed, nothing is said"
    engine.decode(1)
    assert [positions(engine, name) for name in ("a2", "a3", "b1")] == [[1, 2, 1], [2, 3, 2], [1, 0]]
    engine.decode(3)
    assert [type(last(engine, name)) for name in ("a1", "a2", "a3", "b1")] == [Done] * 4
    assert [tuple(request.prompt) for request in engine.ranks.uses] == [(1, 2)] * 4


def test_a_client_that_says_nothing_hears_that_it_is_not_forgotten(engine: HandTurned) -> None:
    engine.ask(A, "a1")
    engine.ask(B, "b1")
    heard = len(engine.events("b1"))
    engine.pass_ms(249)
    engine.coordinator.turn()
    assert len(engine.events("b1")) == heard
    engine.pass_ms(1)
    engine.coordinator.turn()
    assert last(engine, "b1") == Alive("b1", 1)


def test_who_is_refused_learns_when_to_try_again() -> None:
    engine = HandTurned(queue_limit=2, client_queue_limit=1)
    engine.ranks.become_ready()
    for peer, name in ((A, "a1"), (A, "a2"), (A, "a3"), (B, "b1"), (C, "c1")):
        engine.ask(peer, name, max_tokens=1)
    assert [getattr(last(engine, name), "code", None) for name in ("a2", "a3", "b1", "c1")] == [
        None, ErrorCode.QUEUE_FULL, None, ErrorCode.QUEUE_FULL,
    ]  # fmt: skip
    assert "--client-queue-limit" in last(engine, "a3").message
    assert last(engine, "c1").retry_after_s == 1.0, "nothing has run yet"
    engine.pass_ms(300)
    engine.decode(1)
    engine.ask(C, "c2", max_tokens=1)
    assert isinstance(last(engine, "c2"), Accepted)
    engine.ask(C, "c3", max_tokens=1)
    assert last(engine, "c3").retry_after_s == pytest.approx(0.3), "as long as the one that has run"
    assert status(engine).num_refused == 3
    engine.close()


def test_who_is_sooner_done_behind_another_waits_and_lets_others_pass(
    engine: HandTurned, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = [ord("a")]  # what a running request has still to read, as tests of DecodeSlots say
    asked = list[tuple[str, dict[int, int]]]()

    def is_being_read(prompt: Sequence[int], scope: str, commons: dict[int, int]) -> bool:
        asked.append((scope, commons))
        return bool(read) and scope == "of b"

    monkeypatch.setattr(engine.coordinator._slots, "is_being_read", is_being_read)
    engine.ask(A, "waits", max_tokens=2, cache_salt="of b")
    engine.ask(A, "waits-too", max_tokens=2, cache_salt="of b")
    assert status(engine).running is None
    engine.ask(B, "reuses-nothing", max_tokens=2, cache_salt="of b", reuse_kv=False)
    assert (status(engine).running, status(engine).waiting) == ("reuses-nothing", ("waits", "waits-too"))
    engine.decode(2)
    engine.ask(B, "another", max_tokens=2)
    assert status(engine).running == "another"
    engine.decode(2)
    assert status(engine).running is None
    commons = {id(held) for scope, held in asked if scope == "of b"}
    assert len(commons) == 2, "each request has its own"
    read.clear()
    engine.coordinator.turn()
    assert (status(engine).running, status(engine).waiting) == ("waits", ("waits-too",))
    engine.decode(2)
    assert status(engine).running == "waits-too"


def test_a_drain_lets_only_what_runs_go_on(engine: HandTurned) -> None:
    engine.ask(A, "a1", max_tokens=3)
    engine.ask(B, "b1")
    engine.wire.inbox.append((C, Drain()))
    engine.coordinator.turn()
    assert (last(engine, "b1").code, status(engine).waiting) == (ErrorCode.DRAINING, ())
    engine.ask(C, "c1")
    assert last(engine, "c1").code is ErrorCode.DRAINING
    engine.decode(3)
    assert last(engine, "a1").finish_reason is FinishReason.LENGTH
    assert engine.coordinator.run() == 0


# ---- deadlines ----
def test_a_deadline_in_the_queue_is_an_error(engine: HandTurned) -> None:
    engine.ask(A, "a1")
    engine.ask(B, "b1", deadline_s=0.2)
    engine.pass_ms(199.9)
    engine.coordinator.turn()
    assert status(engine).waiting == ("b1",)
    engine.pass_ms(0.1)
    engine.coordinator.turn()
    error = last(engine, "b1")
    assert isinstance(error, Error)
    assert (error.code, status(engine).waiting) == (ErrorCode.DEADLINE_EXCEEDED, ())
    assert "0.200 s after its reception" in error.message
    engine.decode()
    assert len(engine.ranks.uses) == 1, "no rank has seen it"
    assert (status(engine).num_expired, status(engine).num_failed, status(engine).num_completed) == (1, 0, 1)


def test_a_deadline_while_it_runs_leaves_what_was_generated(engine: HandTurned) -> None:
    engine.ask(A, "a1", WORD, deadline_s=0.5)
    engine.ask(B, "b1", max_tokens=1)
    engine.decode(2)
    engine.pass_ms(500)
    engine.coordinator.turn()
    done = last(engine, "a1")
    assert isinstance(done, Done)
    assert (done.finish_reason, done.num_generated_tokens, done.total_s) == (FinishReason.DEADLINE, 2, 0.5)
    assert [event.token_ids for event in engine.events("a1") if isinstance(event, Tokens)] == [(1,), (1,)]
    assert engine.control.cancelled(1), "ranks are told"
    engine.decode(2)
    assert last(engine, "b1").finish_reason is FinishReason.LENGTH, "the ranks are free"
    assert (status(engine).num_expired, status(engine).num_completed) == (1, 1)


def test_a_deadline_covers_the_prefill_and_the_time_in_the_queue(engine: HandTurned) -> None:
    engine.ask(A, "a1", max_tokens=1)
    engine.ask(B, "b1", WORD, deadline_s=0.5)
    engine.pass_ms(400)
    engine.decode(1)
    engine.ranks.begin()
    engine.pass_ms(100)
    engine.coordinator.turn()
    assert (last(engine, "b1").finish_reason, last(engine, "b1").num_generated_tokens) == (FinishReason.DEADLINE, 0)
    assert last(engine, "b1").queue_s == 0.4


def test_tokens_that_came_in_time_are_not_lost_to_the_deadline(engine: HandTurned) -> None:
    engine.ask(A, "a1", WORD, deadline_s=0.5, max_tokens=2)
    engine.ranks.decode(2)
    engine.pass_ms(600)
    engine.coordinator.turn()
    assert last(engine, "a1").finish_reason is FinishReason.LENGTH


def test_idle_ranks_have_a_request_before_anything_that_they_do_not_need(
    engine: HandTurned, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    doorbells: list[int] = []
    send, tokenizer = engine.wire.send, engine.coordinator._model.tokenizer
    assert tokenizer is not None
    stream = tokenizer.stream

    def noting(peer: bytes, event: Event) -> Delivery:
        doorbells.append(engine.ranks.control.doorbell())
        return send(peer, event)

    def decoding(after: Sequence[int]) -> Any:
        doorbells.append(engine.ranks.control.doorbell())
        return stream(after)

    monkeypatch.setattr(engine.wire, "send", noting)
    monkeypatch.setattr(tokenizer, "stream", decoding)
    engine.ask(A, "a1", max_tokens=1)
    assert doorbells == [1, 1], "the decoder of its text, and what its client is told"
    engine.decode(1)
    assert [event.text for event in engine.events("a1") if isinstance(event, Tokens)] == [Letters().push(answer_of((1, 2))[0])]


class Grammars:
    """Stands in for GrammarService: each request is accepted, and meanwhile a runner may be lost."""

    fds: tuple[int, ...] = ()
    slot, loss, is_up = 0, "ended", True  # of the only runner, which it is itself

    def __init__(self) -> None:
        self.askers: list[Any] = []
        self.num_lost, self.runners = 0, [self]
        self.loses_runner = self.answers = False

    def ask(self, asker: Any, client: Any, constraint: Any) -> None:
        self.askers.append(asker)

    def verdicts(self) -> list[Verdict[Any]]:
        self.num_lost += self.loses_runner
        decided, self.askers = (self.askers, []) if self.answers else ([], self.askers)
        return [Verdict(asker, None) for asker in decided]

    def wants(self, epoch: int | None) -> None:
        """No mask is waited for here."""

    def reserve_epochs(self, count: int) -> int:
        return 1

    def run(self, seq: int, mask_epoch: int, constraint: Any, *, drafts: bool) -> None:
        """The next runner does it."""

    def close(self) -> None:
        """Nothing to close."""


def test_a_lost_runner_ends_the_request_that_it_served_and_not_the_one_that_begins(engine: HandTurned) -> None:
    grammars: Any = Grammars()
    for user in (engine.coordinator, engine.coordinator.requests, engine.coordinator._admission):
        user._grammars = grammars
    engine.ask(A, "a1", max_tokens=2, regex="a+")
    grammars.loses_runner = grammars.answers = True
    engine.coordinator.turn()
    assert [type(event) for event in engine.events("a1")] == [Accepted]
    grammars.answers = False
    engine.coordinator.turn()
    assert last(engine, "a1").code is ErrorCode.CONSTRAINT_FAILED


def test_a_grammar_that_cannot_be_followed_ends_its_request_by_name(engine: HandTurned) -> None:
    grammars: Any = Grammars()
    for user in (engine.coordinator, engine.coordinator.requests, engine.coordinator._admission):
        user._grammars = grammars
    grammars.answers = True
    engine.ask(A, "a1", max_tokens=2, regex="a+")
    engine.coordinator.turn()
    engine.decode(1)  # without a mask
    assert last(engine, "a1").code is ErrorCode.CONSTRAINT_FAILED
    assert last(engine, "a1").message == ("regex is too complex: nothing could be said of what may follow token 0; simplify it")


def test_idle_ranks_are_roused_when_a_request_comes_but_not_by_each_of_many(
    engine: HandTurned, monkeypatch: pytest.MonkeyPatch
) -> None:
    doorbells: list[int] = []
    monkeypatch.setattr(engine.control, "rouse", lambda: doorbells.append(engine.control.doorbell()))
    engine.wire.inbox.append((A, Status()))
    engine.coordinator.turn()
    assert doorbells == [], "others ask for the state all the time"
    engine.ask(A, "a1", max_tokens=1)
    assert doorbells == [0], "before its request is there"
    engine.pass_ms(20)
    engine.ask(B, "b1", max_tokens=1)
    assert doorbells == [0], "ranks that work see the next request by themselves"
    engine.decode(2)
    for number in range(3):
        engine.ask(A, f"refused{number}", max_tokens=1000)
        engine.pass_ms(4)
    assert doorbells == [0, 2], "once in 10 ms"


# ---- long texts ----
def test_nobody_waits_for_the_text_of_another(engine: HandTurned) -> None:
    engine.texts.longest_at_once = 4
    engine.ask(A, "a1", "abababab", max_tokens=1)
    engine.ask(B, "b1", WORD, max_tokens=2)
    engine.decode(2)
    assert [type(event) for event in engine.events("b1")] == [Accepted, Tokens, Tokens, Done]
    assert [event for event in engine.events("a1") if not isinstance(event, Alive)] == []
    engine.texts.read()
    engine.decode(2)
    assert [type(event) for event in engine.events("a1") if not isinstance(event, Alive)] == [Accepted, Tokens, Done]
    assert last(engine, "a1").num_prompt_tokens == 8


@pytest.mark.parametrize("end", ["cancelled", "late", "too long", "drained", "gone", "read in vain"])
def test_a_text_that_is_being_read_ends_like_any_request(end: str) -> None:
    engine = HandTurned(queue_limit=1)
    engine.texts.longest_at_once = 4
    engine.ask(A, "a1", "ab" * (CONTEXT if end == "too long" else 4), max_tokens=1, deadline_s=0.5)
    match end:
        case "cancelled" | "read in vain":
            if end == "read in vain":
                engine.texts.read()
            engine.wire.inbox.append((A, Cancel("a1")))
        case "late":
            engine.pass_ms(600)
        case "drained":
            engine.wire.inbox.append((B, Drain()))
        case "gone":
            engine.wire.gone.add(A)
            engine.pass_ms(300)
    for _ in range(2):
        engine.coordinator.turn()
        engine.texts.read()
    counters = engine.coordinator.counters
    wanted = {"late": ErrorCode.DEADLINE_EXCEEDED, "too long": ErrorCode.CONTEXT_LENGTH_EXCEEDED}
    if end == "gone":
        assert counters.num_cancelled == counters.num_dropped_clients == 1
    elif end in ("cancelled", "read in vain"):
        assert (last(engine, "a1").finish_reason, counters.num_cancelled) == (FinishReason.CANCELLED, 1)
    else:
        assert [type(event) for event in engine.events("a1") if not isinstance(event, Alive)] == [Error]
        assert last(engine, "a1").code is wanted.get(end, ErrorCode.DRAINING)
    assert engine.coordinator.requests.find("a1") is None
    engine.close()


def test_a_client_has_no_more_texts_read_than_it_may_have_waiting(engine: HandTurned) -> None:
    engine.texts.longest_at_once = 4
    for number in range(20):
        engine.ask(A, f"a{number}", "ababab", max_tokens=1)
    engine.ask(B, "b1", "ababab", max_tokens=1)
    refused = [engine.events(f"a{number}")[-1] for number in range(16, 20)]
    assert [(event.code, event.retry_after_s is not None) for event in refused] == 4 * [(ErrorCode.QUEUE_FULL, True)]
    assert len(engine.texts.askers) == 17
    engine.ask(B, "b2", "ab" * 32 * CONTEXT + "a")
    assert last(engine, "b2").code is ErrorCode.CONTEXT_LENGTH_EXCEEDED, "what nobody needs to read is refused at once"


# ---- progress and timings ----
def test_prefill_is_visible_at_most_every_100_ms(engine: HandTurned) -> None:
    engine.ask(A, "a1", "ab" * 8, ignore_eos=True)
    engine.ranks.begin()
    for position in range(1, 11):
        engine.ranks.prefill(position)
        engine.pass_ms(30)
        engine.coordinator.turn()
    told = [(event.position, event.num_prompt_tokens) for event in engine.events("a1") if isinstance(event, PrefillProgress)]
    assert told == [(4, 16), (8, 16)]
    assert (status(engine).running_position, status(engine).running_prompt_tokens) == (10, 16)
    engine.decode(1)
    engine.pass_ms(1000)
    engine.coordinator.turn()
    assert isinstance(last(engine, "a1"), Alive), "no prefill after the first token"


def test_timings_of_a_request(engine: HandTurned) -> None:
    engine.ask(A, "a1", max_tokens=1)
    engine.ask(B, "b1", WORD, max_tokens=4, stamps=True)
    engine.pass_ms(50)
    engine.decode(1)
    for gap_ms in (20, 5, 5, 15):
        engine.pass_ms(gap_ms)
        engine.decode(1)
    done = last(engine, "b1")
    assert (done.queue_s, done.ttft_s, done.total_s) == (0.05, 0.07, 0.095)
    assert done.prefill_s == pytest.approx(0.02)
    assert (done.itl_p50_s, done.itl_p99_s) == (0.005, 0.015)
    assert done.tokens_per_s == pytest.approx(3 / 0.025)
    stamps_s = [stamp_s for event in engine.events("b1") if isinstance(event, Tokens) for stamp_s in event.stamps_s]
    assert stamps_s == [0.07, 0.075, 0.08, 0.095]
    engine.ask(C, "c1", max_tokens=1)
    engine.decode(1)
    assert [event.stamps_s for event in engine.events("c1") if isinstance(event, Tokens)] == [()], "only on request"


# ---- conversations ----
def test_a_conversation_prefills_only_what_is_new(engine: HandTurned) -> None:
    engine.ask(A, "a1", WORD, max_tokens=4, ignore_eos=True)
    engine.decode()
    answer = answer_of(Letters().encode(WORD))[:4]
    prompt = (*Letters().encode(WORD), *answer, 2)
    engine.ask(A, "a2", None, prompt_ids=prompt, max_tokens=1)
    engine.decode()
    assert engine.ranks.uses[1].kv == KvUse(0, 0, 6), "the answer's last token was never decoded itself"
    assert [last(engine, name).num_cached_tokens for name in ("a1", "a2")] == [0, 6]
    engine.ask(A, "a3", None, prompt_ids=prompt, max_tokens=1, reuse_kv=False)
    engine.decode()
    assert (last(engine, "a3").num_cached_tokens, engine.ranks.uses[2].kv) == (0, KvUse(1, 1, 0))


def test_a_cancelled_request_leaves_what_it_had_prefilled(engine: HandTurned) -> None:
    engine.ask(A, "a1", "ab" * 8, deadline_s=0.1)
    engine.ranks.begin()
    engine.ranks.prefill(9)
    engine.pass_ms(100)
    engine.coordinator.turn()
    engine.decode(1)
    engine.ask(A, "a2", "ab" * 8, max_tokens=1)
    engine.decode()
    assert last(engine, "a2").num_cached_tokens == 9


def test_tokens_behind_a_stop_string_are_kept_too(engine: HandTurned) -> None:
    """Ranks go on for a moment after a stop string; the cache holds more than the client was told, all of it true."""
    expected = answer_of(Letters().encode(WORD))
    stop = "".join(map(Letters().push, expected[:2]))
    engine.ask(A, "a1", WORD, stop=(stop,), ignore_eos=True)
    engine.ranks.decode(5)
    engine.coordinator.turn()
    assert (last(engine, "a1").finish_reason, last(engine, "a1").num_generated_tokens) == (FinishReason.STOP, 2)
    engine.decode(1)
    engine.ask(A, "a2", None, prompt_ids=(*Letters().encode(WORD), *expected[:5], 1), max_tokens=1)
    engine.decode()
    assert last(engine, "a2").num_cached_tokens == 8


def test_after_a_numerical_fault_nothing_is_reused(engine: HandTurned) -> None:
    engine.ask(A, "a1", WORD)
    engine.ranks.decode(2)
    engine.ranks.decode(1, is_faulty=True)
    engine.coordinator.turn()
    assert last(engine, "a1").code is ErrorCode.NUMERICAL_FAULT
    engine.ask(A, "a2", WORD, max_tokens=1)
    engine.decode()
    assert last(engine, "a2").num_cached_tokens == 0


# ---- clients that are gone or do not read ----
def num_ended(engine: HandTurned) -> int:
    counters = engine.coordinator.counters
    return (
        counters.num_completed + counters.num_cancelled + counters.num_expired + counters.num_failed + counters.num_refused
    )  # fmt: skip


@pytest.mark.parametrize("how", ["deadline", "drain", "abort"])
def test_requests_of_a_client_that_has_gone_end_once(engine: HandTurned, how: str) -> None:
    engine.ask(A, "a1")
    for name in ("b1", "b2", "b3"):
        engine.ask(B, name, deadline_s=0.1)
    engine.wire.gone.add(B)
    if how == "deadline":
        engine.pass_ms(100)
    elif how == "drain":
        engine.wire.inbox.append((A, Drain()))
    else:
        engine.control.set_abort(AbortCause.SHUTDOWN)
    engine.coordinator.turn()
    if how == "abort":
        engine.coordinator.run()
    assert num_ended(engine) == (4 if how == "abort" else 3)
    assert engine.coordinator.counters.num_dropped_clients == 1


def test_a_client_that_does_not_read_its_last_event_is_counted_once(engine: HandTurned) -> None:
    engine.ask(A, "a1", max_tokens=2)
    engine.ask(A, "a2")
    engine.wire.room[A] = 2
    engine.decode(2)
    codes = [event.code for event in engine.wire.delivered[A] if isinstance(event, Error)]
    assert codes == [ErrorCode.SLOW_READER] * 2
    assert isinstance(last(engine, "a1"), Error)
    assert num_ended(engine) == 2
