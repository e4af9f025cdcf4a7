"""The coordinator with a scripted rank 0: what becomes of requests that go well, wait, are cancelled or are refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kog_dist.errors import RequestError, RequestFailed
from kog_dist.rpc.client import Client, DeadlineExceeded, StreamEvent
from kog_dist.rpc.client_events import EXIT_DRAIN_TIMEOUT
from kog_dist.rpc.messages import MAX_PROMPT_IDS, Accepted, Done, EngineState, FinishReason, Tokens
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.transport import Access
from kog_dist.runtime.control import AbortCause, RankState
from kog_dist.workers.coordinator import watch as coordinator_watch

EOS_ID = 256
StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
Events = Iterable[StreamEvent]


def text_of(events: Events) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))


def ids_of(events: Events) -> list[int]:
    return [token_id for event in events if isinstance(event, Tokens) for token_id in event.token_ids]


def finish_of(events: Events) -> FinishReason:
    terminal = [event for event in events if isinstance(event, Done)]
    assert len(terminal) == 1, "exactly one terminal event"
    assert list(events)[-1] is terminal[0], "and it is the last"
    return terminal[0].finish_reason


def test_a_request_from_prompt_to_done(start_engine: StartEngine) -> None:
    engine = start_engine("hello world")
    with engine.client() as client:
        events = list(client.generate("hi", max_tokens=11, temperature=0.5, seed=7, logit_digests=True, stamps=True))
        report = client.status()
    accepted, done = events[0], events[-1]
    assert isinstance(accepted, Accepted)
    assert (accepted.num_prompt_tokens, accepted.max_tokens, accepted.queue_position) == (2, 11, 0)
    assert (text_of(events), ids_of(events)) == ("hello world", list(b"hello world"))
    assert finish_of(events) is FinishReason.LENGTH
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [event.index for event in tokens] == [0, *itertools.accumulate(len(event.token_ids) for event in tokens)][:-1]
    assert sum(len(event.digests) for event in tokens) == 11
    stamps_s = [stamp for event in tokens for stamp in event.stamps_s]
    assert stamps_s == sorted(stamps_s)
    assert isinstance(done, Done)
    assert (done.num_prompt_tokens, done.num_generated_tokens) == (2, 11)
    assert done.ttft_s == stamps_s[0]
    assert done.total_s >= stamps_s[-1] >= done.queue_s
    assert done.tokens_per_s == pytest.approx(10 / (stamps_s[-1] - stamps_s[0]))
    request, sampling = engine.requests[0], engine.requests[0].sampling
    assert (bytes(list(request.prompt)), sampling.temperature, sampling.seed, request.stop_ids) == (b"hi", 0.5, 7, (EOS_ID,))
    assert (report.state, report.num_completed, report.num_tokens, report.running) == (EngineState.READY, 1, 11, None)


def test_one_connection_serves_many_requests(start_engine: StartEngine) -> None:
    engine = start_engine(lambda request: [*request.prompt, EOS_ID])
    with engine.client() as client:
        for word in ("one", "two", "three", "four", "five"):
            events = list(client.generate(word))
            assert (text_of(events), finish_of(events)) == (word, FinishReason.STOP)
            assert ids_of(events) == [*word.encode(), EOS_ID]


def test_ignore_eos_goes_on(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _request: [97, EOS_ID, 98])
    with engine.client() as client:
        events = list(client.generate("x", max_tokens=3, ignore_eos=True))
    assert (text_of(events), ids_of(events), finish_of(events)) == ("ab", [97, EOS_ID, 98], FinishReason.LENGTH)


def test_without_a_limit_the_answer_fills_what_fits(start_engine: StartEngine) -> None:
    engine = start_engine("abc", max_context=10)
    with engine.client() as client:
        assert text_of(client.generate("1234")) == "abcabc"


@pytest.mark.parametrize("over_tcp", [False, True])
def test_a_prompt_fills_the_longest_context(start_engine: StartEngine, over_tcp: bool) -> None:
    """All but one of 262,144 tokens, as ids and as text: they pass the port, the queue and the control page."""
    engine = start_engine("abc", max_context=MAX_PROMPT_IDS, tcp_port=0 if over_tcp else None)
    access = Access.from_file(engine.folder / ACCESS_NAME) if over_tcp else engine.access
    ids = [index % 251 for index in range(MAX_PROMPT_IDS - 1)]
    with Client(access, connect_timeout_s=20.0, patient=True) as client:
        for prompt in (ids, "x" * len(ids)):
            given = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt}
            events = list(client.generate(**given, max_tokens=1, timeout_s=60.0))
            assert (text_of(events), finish_of(events)) == ("a", FinishReason.LENGTH)
    assert [list(request.prompt) for request in engine.requests] == [ids, [ord("x")] * len(ids)]


def test_stop_string_over_several_tokens(start_engine: StartEngine) -> None:
    engine = start_engine("some text</s> that nobody sees", paced=True)
    with engine.client() as client:
        events = client.generate("x", stop=("</s>", "never"), max_tokens=100)
        engine.allow(len("some text</s"))
        seen = ""
        while seen != "some text":
            event = next(events)
            seen += event.text if isinstance(event, Tokens) else ""
            assert "some text".startswith(seen), "what may become a stop string is withheld"
        engine.allow(1)
        rest = list(events)
        assert (seen + text_of(rest), finish_of(rest)) == ("some text", FinishReason.STOP)
        engine.until(lambda: engine.control.cancelled(1))  # ranks are told
        engine.allow(100)
        assert text_of(client.generate("y", max_tokens=4)) == "some"


def test_withheld_text_is_delivered_when_the_answer_ends_otherwise(start_engine: StartEngine) -> None:
    engine = start_engine("tail of</")
    with engine.client() as client:
        assert text_of(client.generate("x", stop=("</s>",), max_tokens=9)) == "tail of</"


def test_withheld_text_is_delivered_on_cancel(start_engine: StartEngine) -> None:
    engine = start_engine("ab</s>", paced=True)
    with engine.client() as client, engine.client() as other:
        events = client.generate("x", stop=("</s>",), max_tokens=100, request_id="mine")
        engine.allow(4)
        seen: list[StreamEvent] = []
        while len(ids_of(seen)) < 4:
            seen.append(next(events))
        assert text_of(seen) == "ab"
        other.cancel("mine")
        seen += events
    assert (text_of(seen), finish_of(seen)) == ("ab</", FinishReason.CANCELLED)


def test_characters_split_over_tokens(start_engine: StartEngine) -> None:
    text = "naïve 😀 ünïcode"
    engine = start_engine(text)
    with engine.client() as client:
        events = list(client.generate("x", max_tokens=len(text.encode())))
    assert text_of(events) == text


def test_requests_wait_while_ranks_load(start_engine: StartEngine) -> None:
    engine = start_engine("late", ready=False)
    with engine.client() as client, engine.client() as other:
        assert client.welcome.state is EngineState.LOADING
        events = client.generate("x", max_tokens=4)
        assert isinstance(next(events), Accepted)
        report = other.status()
        assert (report.state, len(report.waiting), report.running) == (EngineState.LOADING, 1, None)
        assert report.rank_states == ("starting", "starting")
        assert (report.epochs_waited, report.waited_s) == ((None, None), (None, None))
        engine.become_ready()
        assert text_of(list(events)) == "late"


def test_the_queue_is_first_come_first_served_and_bounded(start_engine: StartEngine) -> None:
    engine = start_engine(lambda request: request.prompt, paced=True, queue_limit=2)
    clients = [engine.client() for _ in range(4)]
    streams = [client.generate(name, max_tokens=1) for client, name in zip(clients, "abc", strict=False)]
    first = next(streams[0])
    engine.until(lambda: len(engine.requests) == 1)
    positions = [event.queue_position for stream in streams[1:] if isinstance(event := next(stream), Accepted)]
    assert isinstance(first, Accepted)
    assert (first.queue_position, positions) == (0, [1, 2])
    with pytest.raises(RequestError) as refused:
        next(clients[3].generate("d"))
    assert refused.value.code == "queue_full"
    engine.allow(3)
    assert [text_of(list(stream)) for stream in streams] == ["a", "b", "c"]
    assert [bytes(list(request.prompt)) for request in engine.requests] == [b"a", b"b", b"c"]
    assert clients[0].status().num_refused == 1
    for client in clients:
        client.close()


def test_cancel_of_the_running_and_of_a_waiting_request(start_engine: StartEngine) -> None:
    engine = start_engine("abcdef", paced=True)
    with engine.client() as first, engine.client() as second, engine.client() as other:
        running = first.generate("x", max_tokens=100, request_id="running")
        waiting = second.generate("x", max_tokens=100, request_id="waiting")
        assert isinstance(next(running), Accepted)
        assert isinstance(next(waiting), Accepted)
        engine.allow(2)
        seen = ""
        while seen != "ab":
            event = next(running)
            seen += event.text if isinstance(event, Tokens) else ""
        assert other.cancel("waiting").waiting == ()
        assert finish_of(list(waiting)) is FinishReason.CANCELLED
        other.cancel("running")
        assert finish_of(list(running)) is FinishReason.CANCELLED
        engine.until(lambda: engine.control.cancelled(1))
        with pytest.raises(RequestError) as unknown:
            other.cancel("running")
        assert unknown.value.code == "unknown_request"
        engine.allow(100)
        assert text_of(first.generate("x", max_tokens=6)) == "abcdef"
        assert other.status().num_cancelled == 2


def test_leaving_the_iterator_cancels(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client:
        events = client.generate("x", max_tokens=100)
        assert isinstance(next(events), Accepted)
        events.close()
        assert client.status().running is None
        engine.until(lambda: engine.control.cancelled(1))
        engine.allow(3)
        assert text_of(client.generate("x", max_tokens=3)) == "abc"


def test_the_time_limit_of_a_client_cancels(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client:
        with pytest.raises(DeadlineExceeded):
            list(client.generate("x", max_tokens=100, timeout_s=0.05))
        assert client.status().num_cancelled == 1


def test_a_client_that_vanishes_frees_the_engine(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client:
        lost: Client = engine.client()
        running, waiting = (lost.generate("x", max_tokens=100, request_id=name) for name in ("a", "b"))
        next(running)
        next(waiting)
        lost.close()  # without a word, while nothing is being sent to it
        engine.until(lambda: client.status().num_cancelled == 2)
        assert client.status().num_dropped_clients == 1, "it was one client with two requests"
        engine.until(lambda: engine.control.cancelled(1))
        engine.allow(3)
        assert text_of(client.generate("x", max_tokens=3)) == "abc"
        assert len(engine.requests) == 2, "the waiting request of the lost client never reached the ranks"


@pytest.mark.parametrize(
    ("code", "request_fields"),
    [
        ("invalid_request", {"prompt": ""}),
        ("invalid_request", {"prompt_ids": ()}),
        ("invalid_request", {}),
        ("invalid_request", {"prompt": "x", "prompt_ids": (1,)}),
        ("invalid_request", {"prompt": "x", "max_tokens": 0}),
        ("invalid_request", {"prompt": "x", "temperature": float("nan")}),
        ("invalid_request", {"prompt": "x", "temperature": -1.0}),
        ("invalid_request", {"prompt": "x", "temperature": float("inf")}),
        ("invalid_request", {"prompt": "x", "seed": -1}),
        ("invalid_request", {"prompt": "x", "stop": ("",)}),
        ("invalid_request", {"prompt": "x", "stop": ("y",) * 17}),
        ("invalid_request", {"prompt": "\ud800"}),
        ("token_id_out_of_range", {"prompt_ids": (1, 257)}),
        ("token_id_out_of_range", {"prompt_ids": (-1,)}),
        ("token_id_out_of_range", {"prompt_ids": (2**40,)}),
        ("context_length_exceeded", {"prompt": "x" * 256}),
        ("context_length_exceeded", {"prompt": "x" * 100_000}),
        ("context_length_exceeded", {"prompt": "x" * 250, "max_tokens": 7}),
        ("context_length_exceeded", {"prompt_ids": (1,) * 60_000}),
        ("context_length_exceeded", {"prompt": "x", "max_tokens": 2**31 - 1}),
    ],
)
def test_refusals(start_engine: StartEngine, code: str, request_fields: dict[str, Any]) -> None:
    engine = start_engine("ok")
    with engine.client() as client:
        with pytest.raises(RequestError) as refused:
            list(client.generate(**request_fields))
        assert refused.value.code == code
        assert text_of(client.generate("x" * 250, max_tokens=6)) == "okokok", "the engine is unharmed"
        assert len(engine.requests) == 1


def test_a_model_without_tokenizer_takes_ids_only(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _request: [5, 6, EOS_ID], with_tokenizer=False)
    with engine.client() as client:
        for fields in ({"prompt": "text"}, {"prompt_ids": [1], "stop": ["x"]}):
            with pytest.raises(RequestError) as refused:
                list(client.generate(**fields))
            assert refused.value.code == "no_tokenizer"
        events = list(client.generate(prompt_ids=[1, 2]))
    assert (ids_of(events), text_of(events), finish_of(events)) == ([5, 6, EOS_ID], "", FinishReason.STOP)


def test_an_id_that_is_in_use_is_refused(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client, engine.client() as other:
        events = client.generate("x", max_tokens=3, request_id="same")
        next(events)
        with pytest.raises(RequestError) as refused:
            next(other.generate("x", request_id="same"))
        assert refused.value.code == "duplicate_request_id"
        engine.allow(3)
        assert text_of(list(events)) == "abc"


def test_not_finite_logits_end_the_request_only(start_engine: StartEngine) -> None:
    engine = start_engine("abc")
    engine.faulty_index = 2
    with engine.client() as client:
        seen: list[StreamEvent] = []
        with pytest.raises(RequestFailed) as failed:
            seen.extend(client.generate("x", max_tokens=5))
        assert failed.value.code == "numerical_fault"
        assert text_of(seen) == "ab"
        engine.faulty_index = None
        assert text_of(client.generate("x", max_tokens=3)) == "abc"


@pytest.mark.parametrize(
    ("cause", "code", "exit_code", "words"),
    [
        (AbortCause.RANK_DIED, "rank_failed", 4, "rank 1 died"),
        (AbortCause.RANK_STALLED, "rank_failed", 4, "rank 1 gave no sign of life"),
        (AbortCause.INSTANCE_LOST, "engine_lost", 4, "the engine's instance folder was removed"),
        (AbortCause.SHUTDOWN, "shutdown", 0, "stopped"),
    ],
)
def test_abort_ends_running_and_waiting_requests(
    start_engine: StartEngine, cause: AbortCause, code: str, exit_code: int, words: str
) -> None:
    engine = start_engine("abcdef", paced=True)
    with engine.client() as first, engine.client() as second:
        running, waiting = first.generate("x", max_tokens=100), second.generate("x")
        next(running)
        next(waiting)
        engine.allow(3)
        seen = ""
        while seen != "abc":
            event = next(running)
            seen += event.text if isinstance(event, Tokens) else ""
        engine.abort(cause, 1)
        for stream in (running, waiting):
            with pytest.raises(RequestFailed, match=words) as failed:
                list(stream)
            assert failed.value.code == code
        assert engine.wait_exit() == exit_code
        with pytest.raises(RequestFailed) as lost:
            first.status()
        assert lost.value.code == "engine_lost"
    assert list(engine.folder.iterdir()) == [], "the socket file is gone"


def test_drain_finishes_what_runs_and_refuses_the_rest(start_engine: StartEngine) -> None:
    engine = start_engine("abcdef", paced=True)
    with engine.client() as first, engine.client() as second, engine.client() as third:
        running, waiting = first.generate("x", max_tokens=6), second.generate("x")
        next(running)
        engine.until(lambda: len(engine.requests) == 1)
        next(waiting)
        assert third.drain().state is EngineState.DRAINING
        with pytest.raises(RequestFailed) as ended:
            list(waiting)
        with pytest.raises(RequestError) as refused:
            next(third.generate("x"))
        assert (ended.value.code, refused.value.code) == ("draining", "draining")
        engine.allow(6)
        events = list(running)
        assert (text_of(events), finish_of(events)) == ("abcdef", FinishReason.LENGTH)
        assert engine.wait_exit() == 0


def test_drain_that_takes_too_long_ends_the_request(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True, drain_s=0.05)
    with engine.client() as client:
        running = client.generate("x", max_tokens=100)
        next(running)
        engine.until(lambda: len(engine.requests) == 1)
        engine.control.set_drain()
        with pytest.raises(RequestFailed) as ended:
            list(running)
        assert ended.value.code == "drain_timeout"
        assert engine.wait_exit() == EXIT_DRAIN_TIMEOUT == 5


def test_a_stop_during_a_drain_is_not_called_a_drain_that_took_too_long(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client, engine.client() as other:
        running = client.generate("x", max_tokens=100)
        next(running)
        engine.until(lambda: len(engine.requests) == 1)
        assert other.drain().state is EngineState.DRAINING
        engine.abort(AbortCause.SHUTDOWN, 0)
        with pytest.raises(RequestFailed, match="the engine was stopped") as ended:
            list(running)
        assert ended.value.code == "shutdown"
        assert engine.wait_exit() == 0


@pytest.mark.parametrize("is_stopped", [False, True], ids=["a rank fails", "a rank is silent and the launcher stopped"])
def test_a_lost_rank_ends_requests_though_the_launcher_does_nothing(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(coordinator_watch, "LAUNCHER_GRACE_S", 0.1)
    engine = start_engine("abc", paced=True)
    with engine.client() as client, engine.client() as other:
        running, waiting = client.generate("x", max_tokens=100), other.generate("y")
        next(running)
        next(waiting)
        if is_stopped:
            engine.stop_supervisor()  # of this engine only rank 0 beats, and only between requests
        else:
            engine.control.set_state(1, RankState.FAILED)
            with engine.client() as third:
                assert third.status().state is EngineState.FAILED, "at once, not after the launcher's time"
        for stream in (running, waiting):
            with pytest.raises(RequestFailed, match=r"rank \d has given no sign" if is_stopped else "rank 1 failed") as ended:
                list(stream)
            assert ended.value.code == "rank_failed"
        assert other.status().state is EngineState.FAILED
        assert not engine.control.aborted(), "that is the launcher's to decide"


def test_a_silent_rank_is_the_launchers_to_judge_while_it_runs(start_engine: StartEngine) -> None:
    engine = start_engine()
    watch = coordinator_watch.RankWatch(engine.control, engine.args.supervisor_pid)
    engine.until(lambda: engine.control.beat_age_s(1) > coordinator_watch.SILENT_S)
    assert watch._lost_rank() is None
    engine.stop_supervisor()
    assert "rank 1 has given no sign" in str(watch._lost_rank())


def test_answers_are_exact_under_concurrent_clients_and_cancels(start_engine: StartEngine) -> None:
    engine = start_engine(lambda request: [*request.prompt, EOS_ID], queue_limit=16)
    findings: list[str] = []

    def use(name: str) -> None:
        with engine.client() as client:
            for turn in range(10):
                word = f"{name}-{turn}"
                events = client.generate(word)
                if turn % 3 == 2:
                    next(events)
                    events.close()
                elif (text := text_of(list(events))) != word:
                    findings.append(f"{word} got {text}")

    threads = [threading.Thread(target=use, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert findings == []
