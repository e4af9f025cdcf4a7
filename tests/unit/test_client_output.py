"""What `kog-client` prints of answers and engines, in text and in JSON; and which flags and ids it takes."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.errors import ConfigError, KogError, LaunchError, ProtocolError, RequestError, RequestFailed
from kog_dist.rpc import commands
from kog_dist.rpc.commands import EngineChoice
from kog_dist.rpc.messages import Accepted, Done, EngineState, ErrorCode, FinishReason, PrefillProgress, StatusReport, Tokens
from kog_dist.rpc.prompt_request import PromptRequest, flags_of_one_request, parse_ids, read_schema, sampling_of
from kog_dist.rpc.shown import describe, headline, statistics
from kog_dist.runtime.stages import STAGES
from kog_dist.sampling_params import SamplingParams

DONE = Done("r1", FinishReason.STOP, 7, 3, 0.1, 2.0)
FULL = dataclasses.replace(
    DONE, prefill_s=0.5, ttft_s=0.01234, itl_p50_s=0.001, itl_p99_s=0.0025, tokens_per_s=99.95, num_cached_tokens=4,
    stages_s=tuple(float(idx) for idx in range(len(STAGES))),
)  # fmt: skip
HELLO, WORLD = Tokens("r1", 0, (5, 6), "Hel", (0.1, 0.2), ("a" * 64, "b" * 64)), Tokens("r1", 2, (7,), "lo\x1b[2J", (0.3,))
RATED = Tokens("r1", 0, (5, 6), "ab", (), (), (-0.5, -1.25), (5, 9, 6, 8), (-0.5, -2.0, -1.25, -3.0))


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, of an engine that sends these events, or raises."""
    monkeypatch.setattr(signal, "signal", lambda signum, handler: None)

    def run(events: Sequence[object], *, has_tokenizer: bool = True, timeout_s: float | None = None, **request: Any) -> int:
        def answer(**keywords: Any) -> Iterator[object]:
            asked.append(keywords)
            for event in events:
                if isinstance(event, BaseException):
                    raise event
                yield event

        @contextmanager
        def connect(*args: Any, **options: Any) -> Iterator[Any]:
            yield SimpleNamespace(generate=answer, welcome=SimpleNamespace(has_tokenizer=has_tokenizer))

        monkeypatch.setattr(commands, "_connect", connect)
        given = PromptRequest(**{"prompt": "a", **request})
        return commands.generate(EngineChoice(), given, timeout_s=timeout_s, wait_ready=False)

    asked: list[dict[str, Any]] = []
    run.asked = asked  # type: ignore[attr-defined]
    return run


def test_text_is_printed_as_it_is_on_no_terminal(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([Accepted("r1", 0, 7, 9), HELLO, WORLD, FULL]) == 0
    printed = capsys.readouterr()
    assert printed.out == "Hello\x1b[2J\n"
    assert printed.err == f"{statistics(FULL)}\n"
    assert generate.asked[0]["prompt"] == "a"
    assert generate.asked[0]["timeout_s"] is None


def test_a_terminal_is_not_steered(generate: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert generate([HELLO, WORLD, dataclasses.replace(WORLD, text="a\tb\n é\x07\u200e"), FULL]) == 0
    assert capsys.readouterr().out == "Hello\ufffd[2Ja\tb\n é\ufffd\ufffd\n"


def test_ids_stand_for_text_where_there_is_none(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([HELLO, WORLD, DONE], has_tokenizer=False) == 0
    assert capsys.readouterr().out == "5 6 7 \n"


def test_digests_and_probabilities_come_after_the_figures(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([HELLO, RATED, DONE], logit_digests=True) == 0
    rated = ["5 logprob -0.5000, best 5:-0.5000 9:-2.0000", "6 logprob -1.2500, best 6:-1.2500 8:-3.0000"]
    assert capsys.readouterr().err.splitlines() == [statistics(DONE), "a" * 64, "b" * 64, *rated]
    assert generate([dataclasses.replace(RATED, top_ids=(), top_logprobs=()), DONE]) == 0
    assert capsys.readouterr().err.splitlines()[1:] == ["5 logprob -0.5000", "6 logprob -1.2500"]


def test_an_answer_is_one_object(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([HELLO, WORLD, FULL], as_json=True) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "request_id": "r1", "text": "Hello\x1b[2J", "token_ids": [5, 6, 7], "finish_reason": "stop",
        "usage": {
            "num_prompt_tokens": 7, "num_cached_tokens": 4, "num_generated_tokens": 3, "num_drafted_tokens": 0,
            "num_accepted_tokens": 0,
        },
        "timings": {
            "queue_s": 0.1, "prefill_s": 0.5, "ttft_s": 0.01234, "total_s": 2.0, "itl_p50_s": 0.001, "itl_p99_s": 0.0025,
            "tokens_per_s": 99.95, "stages_s": {stage: idx for idx, stage in enumerate(STAGES)},
        },
    }  # fmt: skip


def test_an_object_has_what_was_asked_for(generate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate([HELLO, DONE], as_json=True, stamps=True, logit_digests=True, sampling=SamplingParams(logprobs=2)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["timings"]["stamps_s"] == [0.1, 0.2]
    assert found["timings"]["stages_s"] == {}
    assert found["logit_digests"] == ["a" * 64, "b" * 64]
    assert found["logprobs"] == []
    assert generate([RATED, DONE], as_json=True, sampling=SamplingParams(logprobs=2)) == 0
    assert json.loads(capsys.readouterr().out)["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}, {"token_id": 9, "logprob": -2.0}]},
        {"token_id": 6, "logprob": -1.25, "top": [{"token_id": 6, "logprob": -1.25}, {"token_id": 8, "logprob": -3.0}]},
    ]


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (RequestError("queue_full", "too many", retry_after_s=1.5), None, "queue_full"),
        (RequestFailed(ErrorCode.STARTUP_FAILED, "no"), None, "startup_failed"),
        (LaunchError("none runs"), None, "no_engine"),
        (ConfigError("wrong"), None, "usage"),
        (ProtocolError("odd"), None, "protocol_error"),
        (KeyboardInterrupt(), 130, "cancelled"),
    ],
)
def test_failures(generate: Any, capsys: pytest.CaptureFixture[str], error: BaseException, code: int | None, shown: str) -> None:
    wanted = error.exit_code if isinstance(error, KogError) else code
    message = str(error) or "the request was cancelled"
    assert generate([error]) == wanted
    assert capsys.readouterr() == ("", f"kog-client: {shown}: {message}\n")
    assert generate([HELLO, error]) == wanted
    assert capsys.readouterr().out == "Hel\n"
    assert generate([HELLO, error], as_json=True) == wanted
    found = json.loads(capsys.readouterr().out)["error"]
    retry = {"retry_after_s": 1.5} if shown == "queue_full" else {}
    assert found == {"code": shown, "message": message, "num_generated_tokens": 2, **retry}


def test_who_has_read_enough_is_no_failure(generate: Any) -> None:
    assert generate([HELLO, BrokenPipeError()]) == 0


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 86400.0, float("inf")])
def test_limits_of_time(generate: Any, capsys: pytest.CaptureFixture[str], timeout_s: float) -> None:
    assert generate([DONE], timeout_s=timeout_s) == ConfigError("").exit_code
    assert f"--timeout must be a positive number of seconds, got {timeout_s}" in capsys.readouterr().err
    assert generate([DONE], timeout_s=86399.0) == 0
    assert 86000 < generate.asked[-1]["timeout_s"] <= 86399.0


def test_what_is_waited_for_is_said() -> None:
    said: list[str] = []
    answer = commands._Answer()
    events = [Accepted("r1", 2, 7, 9), Accepted("r1", 0, 7, 9), PrefillProgress("r1", 5, 9), HELLO, Accepted("r1", 3, 7, 9), DONE]
    commands._follow((event for event in events), answer, lambda event: None, said.append)  # type: ignore[misc]
    assert said == ["waiting: 2 before this one", "", "reading the prompt: 5 of 9 tokens", ""]
    assert (answer.done, answer.token_ids, answer.text) == (DONE, [5, 6], ["Hel"])


@pytest.mark.parametrize(
    ("done", "shown"),
    [
        (DONE, "7 prompt tokens, 3 generated (stop)"),
        (
            FULL,
            "7 prompt tokens (4 cached), 3 generated (stop), first after 12.3 ms, 100.0 tokens/s, gaps p50 1.00 ms, p99 2.50 ms",
        ),
        (
            dataclasses.replace(FULL, itl_p99_s=None),
            "7 prompt tokens (4 cached), 3 generated (stop), first after 12.3 ms, 100.0 tokens/s",
        ),
    ],
)
def test_figures(done: Done, shown: str) -> None:
    assert statistics(done) == shown


REPORT = StatusReport(
    EngineState.READY,
    "one",
    "demo",
    "b",
    1,
    2,
    ("ready", "lost"),
    (0.1, 0.2),
    61.4,
    None,
    (),
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    num_expired=12,
)


def test_an_engine_in_lines() -> None:
    assert describe(REPORT).splitlines() == [
        "one: ready, demo on 2 ranks, up 61 s",
        "ranks    0: ready, 1: lost",
        "prompts  by the decoder",
        "running  -",
        "waiting  - (at most 4)",
        "requests 5 completed, 6 cancelled, 12 expired, 7 failed, 8 refused; 11 tokens",
        "clients  9 lost or dropped, 10 bad messages",
    ]


def test_all_that_an_engine_may_say() -> None:
    full = dataclasses.replace(
        REPORT, world_size=1, rank_states=("ready",), rank_places=("GPU 0",), prefill=True, own_sampling="greedy", running="r9",
        running_position=5, running_prompt_tokens=9, waiting=("a", "b"), client_queue_limit=3, kept_block_tokens=16, kept_used=2,
        kept_slots=8, kept_host_used=1, kept_host_slots=4,
    )  # fmt: skip
    assert describe(full).splitlines()[:8] == [
        "one: ready, demo on 1 rank, up 61 s",
        "ranks    0: ready",
        "rank 0   on GPU 0",
        "prompts  in blocks, through prefill",
        "sampling greedy by default over HTTP",
        "kept     2 of 8 blocks of 16 tokens, 1 of 4 behind them on the host",
        "running  r9 (prefill 5 of 9)",
        "waiting  a b (at most 4, 3 of one client)",
    ]
    later = dataclasses.replace(full, running_position=9, kept_host_slots=0)
    assert "running  r9 (0 tokens generated)" in describe(later)
    assert "kept     2 of 8 blocks of 16 tokens\n" in describe(later)
    several = dataclasses.replace(full, also_running=("r10", "r11"), parallel=4)
    assert "running  r9 (prefill 5 of 9), r10 r11; 3 of 4 together\n" in describe(several)
    ring = dataclasses.replace(full, kept_slots=0, kept_ring=240)
    assert "kept     the last sequence; windowed layers have a ring of 240 positions" in describe(ring)
    assert headline(dataclasses.replace(REPORT, model="")) == "one: ready, no model yet, up 61 s"


def test_replicas_in_lines() -> None:
    router = dataclasses.replace(
        REPORT, replica_names=("a", "b"), replica_states=("ready", "lost: gone"), replica_addresses=("ipc://x", "ipc://y"),
        replica_running=("r1", ""), replica_ranks=(2,),
    )  # fmt: skip
    lines = describe(router).splitlines()
    assert lines[:2] == [
        "one: ready, demo on 2 replicas, up 61 s",
        "ranks    0: ready, 1: lost (of all replicas, one after the other)",
    ]
    assert lines[-2:] == [
        "a        ready, 2 ranks, ipc://x, running r1",
        "b        lost: gone, ranks not known, ipc://y, running -",
    ]
    assert "\x1b" not in describe(dataclasses.replace(REPORT, model="a\x1b[2J"))


# ---- flags ----
@pytest.mark.parametrize(
    ("text", "ids"), [(None, None), ("1", (1,)), ("1,2, 3 ", (1, 2, 3)), ("0", (0,)), ("9" * 20, (int("9" * 20),))]
)
def test_ids(text: str | None, ids: tuple[int, ...] | None) -> None:
    assert parse_ids(text) == ids


@pytest.mark.parametrize("text", ["", "1,", ",1", "a", "-1", "1.0", "9" * 21, "\u0661", "1 2", "1_0"])
def test_what_are_no_ids(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--prompt-ids must be token ids separated by commas"):
        parse_ids(text)


def test_long_ids_are_shown_in_part() -> None:
    with pytest.raises(ConfigError, match=rf"got '{'x' * 60}'$"):
        parse_ids("x" * 60)
    with pytest.raises(ConfigError, match=rf"got '{'x' * 60}\.\.\.'$"):
        parse_ids("x" * 61)


def test_schemas_may_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text("{}")
    assert read_schema(f"@{tmp_path}/s.json") == "{}"
    assert read_schema('{"a": 1}') == '{"a": 1}'
    assert read_schema(None) is None
    with pytest.raises(ConfigError, match=r"--json-schema @.*none cannot be read: No such file"):
        read_schema(f"@{tmp_path}/none")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": "a", "prompt_ids": (1,)}, "--prompt and --prompt-ids exclude each other"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"json_schema": "{}", "regex": "a"}, "--json-schema and --regex exclude each other"),
    ],
)
def test_requests_that_contradict_themselves(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PromptRequest(**wrong)
    assert PromptRequest(max_tokens=1).max_tokens == 1


def test_a_request_goes_to_another_process_whole() -> None:
    given = PromptRequest(
        prompt="a\udc80é", max_tokens=5, stop=("x", "y"), deadline_s=1.5, json_schema="{}", as_json=True, reuse_kv=False,
        sampling=SamplingParams(0.5, 3, logit_bias=((5, 1.5), (6, -2.0))),
    )  # fmt: skip
    assert PromptRequest.read(given.write()) == given
    ids = PromptRequest(prompt_ids=(1, 2), conversation="c", cache_salt="s", regex="a")
    assert PromptRequest.read(ids.write()) == ids
    assert ids.keywords().keys() == {field.name for field in dataclasses.fields(PromptRequest)} - {"as_json"}


def test_sampling_flags() -> None:
    assert sampling_of({"temperature": 0.5, "top_k": None, "logit_bias": ["17=-2.5", "3=1"]}) == SamplingParams(
        0.5, logit_bias=((17, -2.5), (3, 1.0))
    )
    with pytest.raises(ConfigError, match=r"^--top-p "):
        sampling_of({"top_p": 7.0})
    for wrong in ("17", "a=1", "1=b", "=", ""):
        with pytest.raises(ConfigError, match=r"--logit-bias must be ID=BIAS"):
            sampling_of({"logit_bias": [wrong]})


def test_which_flags_were_given() -> None:
    assert list(flags_of_one_request(max_tokens=None, top_p=0.5, stop=[], ids=(), stamps=False, seed=0, as_json=True)) == [
        "--top-p", "--seed", "--as-json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"instance": "a", "endpoint": "ipc://b"}, "--instance and --endpoint exclude each other"),
        ({"instance": "a", "key_file": Path("k")}, "--key-file goes with --endpoint, or alone"),
        ({"endpoint": "tcp://h:1"}, "must be ipc://PATH, or tcp://HOST:PORT with --key-file"),
    ],
)
def test_engines_that_cannot_be_meant(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineChoice(**choice).access()
    assert EngineChoice(endpoint="ipc:///x").access().address == "ipc:///x"
