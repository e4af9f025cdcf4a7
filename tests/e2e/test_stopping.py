"""SIGTERM drains; Ctrl-C ends at any moment, without a trace on screen, in the process table or on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.errors import RequestError, RequestFailed
from kog_dist.rpc.client import Client
from kog_dist.rpc.messages import Done, ErrorCode, FinishReason, Tokens
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from tests.e2e.conftest import NUM_ENDLESS, without_progress
from tests.e2e.launcher_terminal import Terminal

ENDED_S = 30.0  # no promise, only an end of waiting; a loaded machine is slow
CLEAN_S = 30.0  # tests/e2e/test_chaos.py measures the two seconds that are promised

MOMENTS: dict[str, Callable[[EngineSession], bool]] = {
    "name taken": lambda s: s.instance_folder.exists(),
    "reaper started": lambda s: "reaper" in s.processes(),
    "coordinator started": lambda s: "coordinator" in s.processes(),
    "last rank started": lambda s: "rank 1" in s.processes(),
    "client started": lambda s: "client" in s.processes(),
    "socket bound": lambda s: (s.instance_folder / SOCKET_NAME).exists(),
    "tokens on screen": lambda s: len(s.output(stream="out").split()) > 3,
}


def assert_clean(session: EngineSession) -> None:
    until(lambda: not session.leftovers(), CLEAN_S, lambda: f"left behind: {session.leftovers()}")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_interrupting_one_prompt(session: EngineSession, tiny_model: Path, moment: str, signum: signal.Signals) -> None:
    launcher = session.launch(
        str(tiny_model), "--ranks=2", "--prompt-ids=1,2", f"--max-tokens={NUM_ENDLESS}", "--ignore-eos", "--shutdown-timeout=0.2"
    )
    until(lambda: MOMENTS[moment](session), ENDED_S, session.output)
    launcher.send_signal(signum)
    code = launcher.wait(ENDED_S)
    assert_clean(session)
    errors = without_progress(session.output())
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 2, errors
    if signum is signal.SIGINT:
        assert code == 130, errors
    else:  # the request gets its 0.2 s if it has begun, and is far from done then
        assert code in (143, 5), errors


def test_sigterm_drains(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--shutdown-timeout=60")
    with session.connect() as client, Client(Access.from_folder(session.instance_folder)) as other:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=600, ignore_eos=True)
        while not isinstance(next(events), Tokens):
            pass
        launcher.send_signal(signal.SIGTERM)
        until(lambda: other.status().state == "draining", ENDED_S, session.output)
        with pytest.raises(RequestError) as caught:
            list(other.generate(prompt_ids=[1], max_tokens=1))
        assert caught.value.code == ErrorCode.DRAINING
        *_, last = events
        assert isinstance(last, Done)
        assert (last.finish_reason, last.num_generated_tokens) == (FinishReason.LENGTH, 600)
    assert launcher.wait(ENDED_S) == 0
    assert_clean(session)
    assert without_progress(session.output()) == ""
    assert session.output(stream="out").splitlines()[-1] == "kog-launch: SIGTERM: draining, at most 60 s"


def test_drain_has_a_limit(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--shutdown-timeout=0.3", f"--log-dir={session.folder / 'logs'}")
    with session.connect() as client:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_ENDLESS, ignore_eos=True)
        next(events)
        launcher.send_signal(signal.SIGTERM)
        with pytest.raises(RequestFailed) as caught:
            list(events)
        assert caught.value.code == ErrorCode.DRAIN_TIMEOUT
    assert launcher.wait(ENDED_S) == 5, "an answer that was cut off is not a success"
    assert_clean(session)
    assert without_progress(session.output()) == "kog-launch: the running request did not finish within 0.3 s and was ended\n"
    last_words = json.loads((session.folder / "logs" / "exit.json").read_text(encoding="utf-8"))
    assert (last_words["exit_code"], last_words["reason"]) == (5, "drain_timeout")


def test_client_drains_the_engine(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        client.drain()
    assert launcher.wait(ENDED_S) == 0
    assert_clean(session)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_second_signal_does_not_wait(session: EngineSession, tiny_model: Path, signum: signal.Signals, code: int) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2", "--shutdown-timeout=60")
    with session.connect() as client:
        events = client.generate(prompt_ids=[1, 2, 3], max_tokens=NUM_ENDLESS, ignore_eos=True)
        next(events)
        launcher.send_signal(signum)
        until(lambda: "draining" in session.output(stream="out"), ENDED_S, session.output)
        launcher.send_signal(signum)
        with pytest.raises(RequestFailed):
            list(events)
    assert launcher.wait(ENDED_S) == code
    assert_clean(session)


def test_engine_survives_clients_that_vanish(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=2")
    with session.connect() as client:
        arguments = ["generate", "--prompt-ids=1,2", f"--max-tokens={NUM_ENDLESS}", "--ignore-eos", "--instance=engine"]
        lost = session.start("kog_dist.rpc.cli", arguments, "lost")
        until(lambda: client.status().running is not None, ENDED_S, lambda: session.output("lost"))
        os.kill(lost.pid, signal.SIGKILL)
        *_, last = client.generate(prompt_ids=[1, 2, 3], max_tokens=5, ignore_eos=True, timeout_s=ENDED_S)
        assert isinstance(last, Done)
        report = client.status()
        assert report.num_dropped_clients == 1
        assert set(report.rank_states) <= {"ready", "running"}
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0


def test_cancel_leaves_all_ranks_at_the_same_step(session: EngineSession, tiny_model: Path) -> None:
    launcher = session.launch(str(tiny_model), "--ranks=4")
    with session.connect() as client:
        whole = [t for e in client.generate(prompt_ids=[5, 6], max_tokens=40, ignore_eos=True) if isinstance(e, Tokens)
                 for t in e.token_ids]  # fmt: skip
        for length in (0, 1, 2, 5, 9):
            events = client.generate(prompt_ids=list(range(60)), max_tokens=NUM_ENDLESS, ignore_eos=True)
            for _ in range(length + 1):
                next(events)
            events.close()  # cancels
            again = [t for e in client.generate(prompt_ids=[5, 6], max_tokens=40, ignore_eos=True) if isinstance(e, Tokens)
                     for t in e.token_ids]  # fmt: skip
            assert again == whole
        assert client.status().num_cancelled == 5
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(ENDED_S) == 0


def test_output_that_nobody_reads_any_more_changes_nothing(session: EngineSession, tiny_model: Path) -> None:
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "kog_dist.launch.cli", str(tiny_model), "--ranks=1", "--instance=engine"]
    with subprocess.Popen(command, env=session.environment(), stdout=write_fd, stderr=subprocess.PIPE) as launcher:
        os.close(write_fd)
        os.close(read_fd)
        with session.connect() as client:
            assert client.status().state == "ready"
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=ENDED_S)
    assert (launcher.returncode, errors) == (0, b"")
    assert_clean(session)


def test_prompt_answers_on_a_terminal_that_stops_background_output(session: EngineSession, tiny_model: Path) -> None:
    """The client writes from a background group; `stty tostop` must not stop it."""
    terminal = Terminal(session, str(tiny_model), "--ranks=1", "--prompt-ids=1,2", "--max-tokens=4")
    try:
        until(terminal.has_ended, ENDED_S, terminal.shown)
    finally:
        code = terminal.close()
    assert code == 0, terminal.shown()
    assert "2 prompt tokens, 4 generated" in terminal.shown()
    assert_clean(session)


@pytest.mark.parametrize("quiet", [False, True])
def test_who_serves_at_a_terminal_sees_where_and_how_each_request_went(
    session: EngineSession, tiny_model: Path, quiet: bool
) -> None:
    terminal = Terminal(session, str(tiny_model), "--ranks=1", "--http", "--port=0", *(["--quiet"] if quiet else []))
    try:
        until(lambda: "ready after" in terminal.shown(), ENDED_S, terminal.shown)
        if not quiet:
            until(lambda: "  stop " in terminal.shown(), ENDED_S, terminal.shown)
        url = re.findall(r"http://[0-9.:]+", terminal.shown())[-1]
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [1, 2], "max_tokens": 4}, timeout=ENDED_S)
        assert answer.status_code == 200, answer.text
        if not quiet:
            until(lambda: "/v1/completions 200: 2 prompt tokens, 4 generated" in terminal.shown(), ENDED_S, terminal.shown)
        os.kill(terminal.pid, signal.SIGINT)
        until(terminal.has_ended, ENDED_S, terminal.shown)
    finally:
        terminal.close()
    labels = re.findall(r"^  (page|API base|model|devices|context|logs|stop) ", terminal.shown(), re.MULTILINE)
    assert labels == ([] if quiet else ["page", "API base", "model", "devices", "context", "logs", "stop"])
    assert ("/v1/completions" in terminal.shown()) is not quiet
    assert_clean(session)
