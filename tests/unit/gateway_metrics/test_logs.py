"""Lines of the gateway's log: complete, harmless and bounded."""

from __future__ import annotations

import io
import json
import threading

import pytest

from kog_dist.errors import ConfigError
from kog_dist.gateway.logs import (
    MAX_KINDS,
    MAX_VALUE_CHARS,
    REPEATS_PER_WINDOW,
    WINDOW_S,
    LineWriter,
    Log,
    LogLevel,
    RepeatBound,
    RequestLine,
    address_class,
)
from tests.unit.gateway.scripted_engine import until

LINE = RequestLine(
    "req-1", "/v1/completions", 200, "loopback", stream=True, finish_reason="stop", num_prompt_tokens=5, num_cached_tokens=0,
    num_generated_tokens=7, queue_s=0.0, ttft_s=0.0123456789, total_s=0.5, tokens_per_s=12.5, prompt="my prompt",
    answer="my answer",
)  # fmt: skip


def lines_of(
    log_format: str = "json", *, with_prompts: bool = False, secrets: tuple[str, ...] = (), at: float = 0.0
) -> tuple[Log, io.StringIO]:
    stream = io.StringIO()
    return Log(stream, log_format=log_format, with_prompts=with_prompts, secrets=secrets, wall_clock=lambda: at), stream


def read(log: Log, stream: io.StringIO) -> list[dict[str, object]]:
    log.close()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_as_json() -> None:
    log, stream = lines_of(at=1_700_000_000.25)
    log.request(LINE)
    assert read(log, stream) == [
        {
            "time": "2023-11-14T22:13:20.250Z", "level": "info", "event": "request", "request_id": "req-1",
            "endpoint": "/v1/completions", "status": 200, "client": "loopback", "stream": True, "finish_reason": "stop",
            "num_prompt_tokens": 5, "num_cached_tokens": 0, "num_generated_tokens": 7, "queue_s": 0.0, "ttft_s": 0.012346,
            "total_s": 0.5, "tokens_per_s": 12.5,
        }
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (LINE, "/v1/completions 200: 5 prompt tokens, 7 generated, first after 12 ms, 12 tokens/s, stop"),
        (
            RequestLine("r", "/v1/responses", 200, "local", num_generated_tokens=9, num_reasoning_tokens=4, num_calls=2),
            "/v1/responses 200: 9 generated (4 of thought), 2 calls",
        ),
        (
            RequestLine(
                "r", "/v1/responses", 200, "local", num_prompt_tokens=2000, num_cached_tokens=1999, queue_s=1.5, ttft_s=1.6
            ),
            "/v1/responses 200: 2,000 prompt tokens (1,999 cached), first after 1,600 ms (1,500 in the queue)",
        ),
        (RequestLine("r", "/v1/completions", 499, "local"), "/v1/completions 499: the client has gone"),
        (
            RequestLine("r", "/v1/completions", 499, "local", num_prompt_tokens=9, queue_s=2.5),
            "/v1/completions 499: 9 prompt tokens, 2,500 ms in the queue, the client has gone",
        ),
        (RequestLine("r", "/v1/completions", 429, "local", error="queue_full"), "/v1/completions 429: queue_full"),
        (RequestLine("r", "/v1/completions", 200, "local", num_prompt_tokens=1), "/v1/completions 200: 1 prompt token"),
    ],
)
def test_a_request_as_a_sentence(line: RequestLine, sentence: str) -> None:
    assert line.sentence() == sentence


def test_a_terminal_has_a_sentence_about_each_request_and_nothing_else() -> None:
    terminal = io.StringIO()
    log = Log(io.StringIO(), with_prompts=True, terminal=terminal)
    log.event("listening")
    log.request(LINE)
    log.request(RequestLine("r", "/v1/\x1b[2J", 400, "local"))
    log.close()
    first, second = terminal.getvalue().splitlines()
    assert first[8:] == f" {LINE.sentence()}"
    assert "\x1b" not in second
    assert "my prompt" not in first


def test_a_request_as_text() -> None:
    log, stream = lines_of("text")
    log.request(LINE)
    log.event("listening", url="http://127.0.0.1:8000", note="two words")
    log.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("1970-01-01T00:00:00.000Z info    request request_id=req-1 endpoint=/v1/completions status=200")
    assert " stream=true " in first
    assert second.endswith(' listening url=http://127.0.0.1:8000 note="two words"')


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_prompts_and_answers_only_when_asked_for(log_format: str) -> None:
    for wanted in (False, True):
        log, stream = lines_of(log_format, with_prompts=wanted)
        log.request(LINE)
        log.close()
        assert ("my prompt" in stream.getvalue()) == wanted
        assert ("my answer" in stream.getvalue()) == wanted


@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize(
    "text", ["Authorization: Bearer abc.DEF-123", "key sk-proj-0123456789abc", "x top-secret y", "x top-secret-2 y"]
)
def test_no_keys(log_format: str, text: str) -> None:
    log, stream = lines_of(log_format, secrets=("top-secret", "top-secret-2"))
    log.problem("refused", text, header=text)
    log.close()
    for secret in ("abc.DEF", "sk-proj", "top-secret", "-2 y"):
        assert secret not in stream.getvalue()
    assert stream.getvalue().count("[secret]") == 2


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_nobody_writes_a_line_of_his_own(log_format: str) -> None:
    evil = "x\n2026-01-01T00:00:00.000Z error engine_lost\r\x1b[31m\x85\u2028\u2029 y"
    log, stream = lines_of(log_format)
    log.problem("refused", evil)
    log.request(RequestLine(evil, "/v1/completions", 400, "public"))
    log.close()
    assert len(stream.getvalue().splitlines()) == 2
    assert "\x1b" not in stream.getvalue()


def test_long_values_are_cut() -> None:
    log, stream = lines_of()
    log.problem("refused", "a" * 10_000)
    (line,) = read(log, stream)
    assert line["message"] == "a" * MAX_VALUE_CHARS + "... (10000 characters)"


def test_equal_problems_are_counted_not_repeated() -> None:
    now = [0.0]
    stream = io.StringIO()
    log = Log(stream, log_format="json", clock=lambda: now[0])
    for _ in range(100):
        log.problem("engine_lost", "gone", level=LogLevel.ERROR)
    log.problem("slow_reader", "another kind is not held back")
    now[0] = WINDOW_S
    log.problem("engine_lost", "still gone")
    found = read(log, stream)
    assert [line["event"] for line in found] == ["engine_lost"] * REPEATS_PER_WINDOW + ["slow_reader", "engine_lost"]
    assert found[-1]["left_out"] == 100 - REPEATS_PER_WINDOW
    assert found[0]["level"] == "error"


def test_the_books_of_problems_are_bounded() -> None:
    bound = RepeatBound()
    admitted = [bound.admit(f"kind {idx}", 0.0) for idx in range(3 * MAX_KINDS)]
    assert sum(one is not None for one in admitted) <= MAX_KINDS + REPEATS_PER_WINDOW


class StuckStream(io.StringIO):
    """A pipe whose reader has stopped reading."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.free.wait(20)
        return super().write(text)


def test_a_stuck_reader_costs_lines_not_the_caller() -> None:
    stream = StuckStream()
    writer = LineWriter(stream, max_pending=10)
    writer.put("first")
    assert stream.entered.wait(10)
    for idx in range(25):
        writer.put(f"line {idx}")  # would block here if it wrote by itself
    assert writer.num_dropped == 15
    stream.free.set()
    writer.close(10.0)
    assert stream.getvalue().splitlines() == ["first", *(f"line {idx}" for idx in range(10))]


def test_dropped_lines_are_told_at_the_end() -> None:
    stream = StuckStream()
    log = Log(stream, log_format="json")
    log.event("first")
    assert stream.entered.wait(10)
    for _ in range(1024 + 7):
        log.event("more")
    assert log.num_dropped == 7
    stream.free.set()
    until(lambda: stream.getvalue().count("\n") == 1 + 1024)  # then there is room for one more
    log.close()
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert (last["event"], last["count"]) == ("log_lines_dropped", 7)
    log = Log(io.StringIO(), log_format="json")
    log.close()
    assert log.num_dropped == 0


def test_a_stream_that_fails_is_no_error() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    log = Log(Full())
    log.event("first")
    log.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.1", "loopback"), ("10.1.2.3", "private"),
        ("192.168.0.9", "private"), ("fe80::1%eth0", "private"), ("8.8.8.8", "public"), ("2606:4700::1", "public"),
        ("", "local"), (None, "local"), ("testclient", "local"),
    ],
)  # fmt: skip
def test_clients_are_told_by_class(host: str | None, expected: str) -> None:
    assert address_class(host) == expected


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="log_format must be text or json, got 'xml'"):
        Log(log_format="xml")


def test_each_window_begins_anew_and_says_what_the_last_one_left_out() -> None:
    bound = RepeatBound(2, 10.0)
    assert [bound.admit("a", now_s) for now_s in (0.0, 1.0, 2.0, 9.9)] == [0, 0, None, None]
    assert [bound.admit("a", now_s) for now_s in (10.0, 11.0, 12.0)] == [2, 0, None], "four came, two were let through"
    assert [bound.admit("a", now_s) for now_s in (20.0, 30.0, 31.0)] == [1, 0, 0], "one, and then none, was left out"
    assert bound.admit("b", 31.0) == 0


def test_kinds_are_bounded() -> None:
    bound = RepeatBound(1, 10.0)
    for number in range(MAX_KINDS):
        assert bound.admit(f"kind {number}", 0.0) == 0
    assert bound.admit("one more", 0.0) == 0
    assert bound.admit("and another", 0.0) is None, "they count as one kind"
    assert bound.admit("kind 0", 10.0) == 0
