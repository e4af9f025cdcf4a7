"""The fake engine, turned by hand: its schedule, its answers, and what becomes of clients."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import cast

import pytest

from kog_dist.bench.fakes.fake_engine import FakeEngine, FakeEngineSettings, with_context
from kog_dist.bench.fakes.replay_script import ReplayScript
from kog_dist.errors import ConfigError
from kog_dist.rpc.listener import Delivery, RpcListener
from kog_dist.rpc.messages import (
    Accepted,
    Alive,
    Cancel,
    Done,
    Drain,
    EngineState,
    Error,
    ErrorCode,
    Event,
    FinishReason,
    Generate,
    Request,
    Status,
    StatusReport,
    Tokens,
)
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.coordinator.model_folder import ModelFolder

SETTINGS = FakeEngineSettings("t", rate=1000.0)
TEXT = "def add(a, b):\n    return a + b\n"


class FakeListener:
    """The listener's face towards the engine; requests are put in, events are kept by client."""

    def __init__(self) -> None:
        self.requests: list[tuple[bytes, Request]] = []
        self.events: list[tuple[bytes, Event]] = []
        self.gone: set[bytes] = set()
        self.num_bad_messages = 0
        self.has_backlog = False

    def receive(self, max_messages: int) -> list[tuple[bytes, Request]]:
        taken, self.requests = self.requests[:max_messages], self.requests[max_messages:]
        return taken

    def send(self, peer: bytes, event: Event) -> Delivery:
        if peer in self.gone:
            return Delivery.GONE
        self.events.append((peer, event))
        return Delivery.TAKEN

    def is_behind(self, peer: bytes) -> bool:
        return False

    def flush(self) -> list[bytes]:
        return []


class Bench:
    """An engine whose clock is moved by hand."""

    def __init__(self, served: ModelFolder, settings: FakeEngineSettings) -> None:
        assert served.tokenizer is not None
        self.now_ns = 0
        self.listener = FakeListener()
        self.engine = FakeEngine(
            settings, with_context(served, 32768), ReplayScript.of_text(TEXT, served.tokenizer),
            cast(RpcListener, self.listener), lambda: self.now_ns,
        )  # fmt: skip

    def ask(self, request: Request, peer: bytes = b"a") -> list[Event]:
        self.listener.requests.append((peer, request))
        return self.at(0)

    def at(self, later_ns: int) -> list[Event]:
        """Events that are sent `later_ns` from now."""
        self.now_ns += later_ns
        before = len(self.listener.events)
        self.engine.turn()
        return [event for _, event in self.listener.events[before:]]


@pytest.fixture(scope="module")
def served() -> ModelFolder:
    return ModelFolder.from_folder(Path(str(resources.files("kog_dist"))) / "models" / "demo", "demo")


@pytest.fixture
def bench(served: ModelFolder) -> Bench:
    return Bench(served, SETTINGS)


def generated(events: list[Event]) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def test_tokens_come_on_an_absolute_schedule_and_late_ones_together(bench: Bench) -> None:
    first = bench.ask(Generate("r", prompt="x", max_tokens=20, ignore_eos=True))
    assert isinstance(first[0], Accepted)
    assert len(generated(first)) == 1
    assert bench.at(900_000) == []
    assert len(generated(bench.at(100_000))) == 1  # 1 ms
    late = bench.at(2_600_000)  # 3.6 ms: two more are due, in one event
    assert [len(event.token_ids) for event in late if isinstance(event, Tokens)] == [2]
    assert len(generated(bench.at(400_000))) == 1  # 4.0 ms: the delay is not carried on


def test_answer_is_the_text_and_ends_with_it(bench: Bench, served: ModelFolder) -> None:
    events = bench.ask(Generate("r", prompt="x", max_tokens=256))
    while not isinstance(events[-1], Done):
        events += bench.at(1_000_000)
    assert "".join(event.text for event in events if isinstance(event, Tokens)) == TEXT
    assert events[-1].finish_reason is FinishReason.STOP
    assert generated(events)[-1] in served.eos_ids
    assert bench.engine.counters.num_completed == 1


def test_longer_answers_repeat_the_text_and_stop_strings_hold(bench: Bench) -> None:
    events = bench.ask(
        Generate("r", prompt="x", max_tokens=200, ignore_eos=True, stamps=True, sampling=SamplingParams(logprobs=2))
    ) + bench.at(10**9)
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    assert text.startswith(TEXT + TEXT)
    tokens = next(event for event in events if isinstance(event, Tokens) and len(event.token_ids) > 1)
    assert len(tokens.stamps_s) == len(tokens.logprobs) == len(tokens.top_ids) / 2 == len(tokens.token_ids)
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.num_generated_tokens) == (FinishReason.LENGTH, 200)
    stopped = bench.ask(Generate("s", prompt="x", stop=("return",))) + bench.at(10**9)
    assert "".join(event.text for event in stopped if isinstance(event, Tokens)) == TEXT.partition("return")[0]


def test_first_token_comes_after_the_prefill(served: ModelFolder) -> None:
    bench = Bench(served, replace(SETTINGS, prefill_s=0.005))
    assert generated(bench.ask(Generate("r", prompt="x", max_tokens=2))) == []
    assert len(generated(bench.at(5_000_000))) == 1


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_requests_wait_their_turn(served: ModelFolder, at_a_time: int) -> None:
    bench = Bench(served, replace(SETTINGS, max_running=at_a_time))
    bench.ask(Generate("r", prompt="x", max_tokens=3, ignore_eos=True))
    accepted, *rest = bench.ask(Generate("s", prompt="x", max_tokens=3, ignore_eos=True), b"b")
    assert isinstance(accepted, Accepted)
    assert (accepted.queue_position, bool(generated(rest))) == ((1, False) if at_a_time == 1 else (0, True))
    report = bench.ask(Status())[0]
    assert isinstance(report, StatusReport)
    assert (report.running, report.waiting) == ("r", ("s",) if at_a_time == 1 else ())
    assert (report.world_size, report.rank_states) == (1, ("running",))
    for _ in range(3):  # the first ends, the second begins, the second ends
        bench.at(10**9)
    assert bench.engine.counters.num_completed == 2


def test_cancel_ends_a_request_with_done(bench: Bench) -> None:
    bench.ask(Generate("r", prompt="x", max_tokens=100))
    done = bench.ask(Cancel("r"))[0]
    assert isinstance(done, Done)
    assert (done.finish_reason, bench.at(10**9)) == (FinishReason.CANCELLED, [])
    unknown = bench.ask(Cancel("r"))[0]
    assert isinstance(unknown, Error)
    assert unknown.code is ErrorCode.UNKNOWN_REQUEST


def test_a_client_that_goes_frees_the_engine(bench: Bench) -> None:
    bench.ask(Generate("r", prompt="x", max_tokens=100))
    bench.ask(Generate("s", prompt="x", max_tokens=1), b"b")
    bench.listener.gone.add(b"a")
    bench.at(1_000_000)
    assert isinstance(bench.at(0)[-1], Done)
    assert (bench.engine.counters.num_cancelled, bench.engine.counters.num_dropped_clients) == (1, 1)


def test_deadline_and_silence(served: ModelFolder) -> None:
    bench = Bench(served, replace(SETTINGS, prefill_s=60.0))
    bench.ask(Generate("r", prompt="x", max_tokens=100, deadline_s=1.0))
    assert isinstance(bench.at(250_000_000)[0], Alive)
    done = bench.at(750_000_000)[0]
    assert isinstance(done, Done)
    assert done.finish_reason is FinishReason.DEADLINE


def test_drain_finishes_what_runs_and_refuses_the_rest(bench: Bench) -> None:
    bench.ask(Generate("r", prompt="x", max_tokens=2))
    bench.ask(Generate("s", prompt="x", max_tokens=2), b"b")
    refused, report = bench.ask(Drain())
    assert isinstance(refused, Error)
    assert isinstance(report, StatusReport)
    assert (refused.request_id, refused.code, report.state) == ("s", ErrorCode.DRAINING, EngineState.DRAINING)
    assert isinstance(bench.at(10**9)[-1], Done)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Generate("r", prompt="x", json_schema="{}"), ErrorCode.INVALID_CONSTRAINT),
        (Generate("r", prompt="x", max_tokens=40_000), ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (Generate("r", prompt_ids=(10**6,)), ErrorCode.TOKEN_ID_OUT_OF_RANGE),
    ],
)
def test_what_cannot_be_answered_is_refused(bench: Bench, message: Generate, code: ErrorCode) -> None:
    error = bench.ask(message)[0]
    assert isinstance(error, Error)
    assert (error.request_id, error.code) == ("r", code)


def test_a_text_without_tokens_cannot_be_replayed() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        ReplayScript((), None)
