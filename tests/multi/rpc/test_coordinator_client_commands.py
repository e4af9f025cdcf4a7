"""`kog-client` against a coordinator: output, exit codes, Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kog_dist.rpc.output import progress_line
from kog_dist.runtime.control import AbortCause
from kog_dist.runtime.stages import RANK_STAGES, STAGES

StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
PATIENCE_S = 30.0


def command(engine: Any, *arguments: str) -> list[str]:
    verb, *rest = arguments
    return [sys.executable, "-m", "kog_dist.rpc.cli", verb, f"--endpoint={engine.access.address}", *rest]


def run(engine: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(engine, *arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_generate_streams_text_and_ends_with_statistics(start_engine: StartEngine) -> None:
    engine = start_engine("def f():\n    pass</s>")
    done = run(engine, "generate", "--prompt=x", "--stop=</s>", "--max-tokens=100")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "def f():\n    pass\n"
    assert "1 prompt tokens, 21 generated (stop)" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_generate_json_is_one_object(start_engine: StartEngine) -> None:
    engine = start_engine("ab")
    done = run(engine, "generate", "--prompt-ids=1,2,3", "--max-tokens=4", "--json", "--logit-digests", "--stamps")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("abab", [97, 98, 97, 98], "length")
    counts = {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_generated_tokens": 4}
    assert answer["usage"] == {**counts, "num_drafted_tokens": 0, "num_accepted_tokens": 0}
    assert [len(digest) for digest in answer["logit_digests"]] == [64] * 4
    assert len(answer["timings"]["stamps_s"]) == 4
    assert answer["timings"]["ttft_s"] == answer["timings"]["stamps_s"][0]
    stages_s = answer["timings"]["stages_s"]
    assert tuple(stages_s) == STAGES
    own_s = [stages_s[name] for name in ("admitted", "started", "submitted", "put", "taken", "sent")]
    assert own_s == sorted(own_s)
    assert [stages_s[name] for name in RANK_STAGES] == [None] * len(RANK_STAGES), "these ranks are played"


def test_without_a_tokenizer_ids_are_printed(start_engine: StartEngine) -> None:
    engine = start_engine(lambda _request: [7, 8, 256], with_tokenizer=False)
    done = run(engine, "generate", "--prompt-ids=1")
    assert (done.returncode, done.stdout.split()) == (0, ["7", "8", "256"])
    refused = run(engine, "generate", "--prompt=text", "--json")
    assert refused.returncode == 2
    assert json.loads(refused.stdout)["error"]["code"] == "no_tokenizer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "either --prompt or --prompt-ids"),
        (["generate", "--prompt=x", "--prompt-ids=1"], "either --prompt or --prompt-ids"),
        (["generate", "--prompt-ids=1,x"], "separated by commas"),
        (["generate", "--prompt=x", "--timeout=-1"], "--timeout must be a positive number"),
        (
            ["generate", "--prompt=x", "--temperature=nan"],
            "--temperature must be between 0 and 100",
        ),
        (["generate", "--prompt=x", "--temperature=-1"], "--temperature must be between 0 and 100"),
        (["generate", "--prompt=x", "--temperature=-1e-9"], "--temperature must be between 0 and 100"),
        (["status", "--timeout=-5"], "--timeout must be a positive number"),
        (["drain", "--timeout=nan"], "--timeout must be a positive number"),
        (["cancel", "bad id"], "invalid_request: cancel: request_id must be 1 to 64"),
        (["generate", "--prompt-ids=257"], "vocabulary has ids 0 to 256"),
        (["generate", "--prompt=x", "--max-tokens=256"], "exceed the context of 256 tokens"),
        (["generate", "--prompt=x", "--instance=a"], "--instance and --endpoint exclude each other"),
        (["cancel", "unknown"], "no request 'unknown'"),
        (["cancel"], "no request is running"),
    ],
)
def test_what_is_refused_is_one_line_and_exit_code_2(start_engine: StartEngine, arguments: list[str], words: str) -> None:
    done = run(start_engine(), *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_engine_is_exit_code_3(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.abort(AbortCause.SHUTDOWN, 0)
    assert engine.wait_exit() == 0
    done = run(engine, "status")
    assert done.returncode == 3
    assert "no engine listens" in done.stderr


def test_a_failed_rank_is_exit_code_4(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    client = subprocess.Popen(command(engine, "generate", "--prompt=x", "--json"), stdout=subprocess.PIPE, text=True)
    engine.until(lambda: len(engine.requests) == 1)
    engine.abort(AbortCause.RANK_DIED, 1)
    output, _ = client.communicate(timeout=PATIENCE_S)
    assert client.returncode == 4
    assert json.loads(output)["error"]["code"] == "rank_failed"


def test_the_time_limit_is_exit_code_5(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    done = run(engine, "generate", "--prompt=x", "--timeout=0.5")
    assert done.returncode == 5
    assert "time limit" in done.stderr
    engine.until(lambda: engine.control.cancelled(1))


def test_ctrl_c_cancels_the_request(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    client = subprocess.Popen(
        command(engine, "generate", "--prompt=x"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    engine.allow(1)
    assert client.stdout is not None
    assert client.stdout.read(1) == "a"
    client.send_signal(signal.SIGINT)
    _, errors = client.communicate(timeout=PATIENCE_S)
    assert (client.returncode, errors) == (130, "kog-client: cancelled: the request was cancelled\n")
    engine.until(lambda: engine.control.cancelled(1))


def test_a_reader_that_has_enough_ends_the_client_quietly(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    read_fd, write_fd = os.pipe()
    client = subprocess.Popen(command(engine, "generate", "--prompt=x"), stdout=write_fd, stderr=subprocess.PIPE, text=True)
    os.close(write_fd)
    engine.allow(1)
    assert os.read(read_fd, 1) == b"a"
    os.close(read_fd)
    engine.allow(1)
    _, errors = client.communicate(timeout=PATIENCE_S)
    assert (client.returncode, errors) == (0, "")
    engine.until(lambda: engine.control.cancelled(1))


GENERATE = ["generate", "--prompt=x", "--max-tokens=3"]


@pytest.mark.parametrize(
    ("arguments", "redirection", "words"),
    [
        (GENERATE, ">/dev/full", "No space left on device"),
        ([*GENERATE, "--json"], ">/dev/full", "No space left on device"),
        (["status"], ">/dev/full", "No space left on device"),
        (["status", "--json"], ">/dev/full", "No space left on device"),
        (["cancel", "unknown", "--json"], ">/dev/full", "No space left on device"),
        (["generate", "--help"], ">/dev/full", "No space left on device"),
        (GENERATE, ">&-", "standard output is closed"),
        (["status", "--json"], ">&-", "standard output is closed"),
    ],
)
def test_an_answer_that_cannot_be_written_is_one_line_and_exit_code_3(
    start_engine: StartEngine, arguments: list[str], redirection: str, words: str
) -> None:
    done = run_in_shell(start_engine("abc"), arguments, redirection)
    assert done.returncode == 3, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_without_standard_error_the_answer_stays_clean(start_engine: StartEngine, redirection: str) -> None:
    engine = start_engine("abc")
    done = run_in_shell(engine, GENERATE, redirection)
    assert (done.returncode, done.stdout, done.stderr) == (0, "abc\n", "")
    refused = run_in_shell(engine, ["cancel", "unknown"], redirection)
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_reader_that_has_gone_is_no_trace_of_status(start_engine: StartEngine) -> None:
    done = run_in_shell(start_engine(), ["status"], "| :")
    assert (done.returncode, done.stderr) == (0, "")


def run_in_shell(engine: Any, arguments: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    line = f"{shlex.join(command(engine, *arguments))} {redirection}"
    return subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_wait_ready_waits_for_an_engine_that_loads(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_engine("abc", ready=False)
    report, was_asked = engine.coordinator._report, threading.Event()

    def counted_report() -> Any:
        was_asked.set()
        return report()

    monkeypatch.setattr(engine.coordinator, "_report", counted_report)
    client = subprocess.Popen(
        command(engine, "generate", "--prompt=x", "--max-tokens=3", "--wait-ready"), stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert was_asked.wait(PATIENCE_S)
    engine.become_ready()
    output, _ = client.communicate(timeout=PATIENCE_S)
    assert (client.returncode, output) == (0, "abc\n")


def test_status_cancel_and_drain(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    with engine.client() as client:
        events = client.generate("x", request_id="mine")
        next(events)
        engine.until(lambda: len(engine.requests) == 1)
        shown = run(engine, "status")
        assert (shown.returncode, shown.stdout.startswith("test: ready, tiny on 2 ranks")) == (0, True)
        assert "running  mine" in shown.stdout
        assert json.loads(run(engine, "status", "--json").stdout)["running"] == "mine"
        assert run(engine, "cancel").returncode == 0
        engine.until(lambda: engine.control.cancelled(1))
        drained = run(engine, "drain", "--json")
        assert json.loads(drained.stdout)["state"] == "draining"
    assert engine.wait_exit() == 0


def test_a_full_queue_says_when_to_try_again(start_engine: StartEngine) -> None:
    engine = start_engine("a", paced=True, queue_limit=1)
    with engine.client() as first, engine.client() as second:
        streams = [client.generate("x", max_tokens=1) for client in (first, second)]
        for stream in streams:
            next(stream)
        done = run(engine, "generate", "--prompt=x", "--json")
        assert done.returncode == 2
        error = json.loads(done.stdout)["error"]
        assert (error["code"], error["retry_after_s"]) == ("queue_full", 1.0)
        engine.allow(2)


def test_a_deadline_and_the_cache_are_asked_for_by_flags(start_engine: StartEngine) -> None:
    engine = start_engine("abc", paced=True)
    engine.allow(2)
    done = run(engine, "generate", "--prompt=x", "--deadline=0.5", "--no-reuse-kv", "--json")
    answer = json.loads(done.stdout)
    assert (answer["finish_reason"], answer["text"], answer["usage"]["num_cached_tokens"]) == ("deadline", "ab", 0)
    assert answer["timings"]["total_s"] >= 0.5


def test_progress_is_one_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_line(enabled=True) as progress:
        progress("not a terminal")
    assert terminal.getvalue() == ""
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with progress_line(enabled=True) as progress:
        for line in ("waiting", "waiting", "reading"):
            progress(line)
    assert terminal.getvalue() == "\r\x1b[Kwaiting\r\x1b[Kreading\r\x1b[K"
