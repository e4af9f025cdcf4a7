"""The coordinator as a process: signals, a launcher that is killed, what it says when it cannot start."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from kog_dist.errors import ConfigError, RequestFailed
from kog_dist.rpc.messages import Done, EngineState, FinishReason
from kog_dist.runtime.control import NO_RANK, AbortCause, ControlPage
from kog_dist.runtime.instance import Instance
from kog_dist.workers.coordinator.arguments import CoordinatorArgs

StartEngine = Callable[..., Any]  # the FakeEngine of conftest.py
PATIENCE_S = 20.0
ARGS = CoordinatorArgs("name", "/folder", -1, 5, "/model", "tiny", 1, 2.5)


def run_process(args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kog_dist.workers.coordinator.process", args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, close_fds=False)


def test_arguments_survive_the_command_line() -> None:
    for args in (ARGS, dataclasses.replace(ARGS, rpc_port=0, drain_s=3)):
        assert CoordinatorArgs.from_json(args.to_json()) == args


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ("{}", "missing fields: .*control_fd"),
        (ARGS.to_json().replace("rpc_port", "port"), "unknown fields: port"),
        (ARGS.to_json().replace("2.5", "true"), "drain_s must be float"),
        (ARGS.to_json().replace('"/model"', "7"), "model must be str"),
    ],
)
def test_wrong_arguments_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CoordinatorArgs.from_json(text)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"control_fd": 999}, "descriptor 999"),
        ({"model": "/nowhere"}, "config.json"),
        ({"supervisor_pid": 2**22 + 1}, "the launcher"),
        ({"folder": "/"}, "mode 0700"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(start_engine: StartEngine, damage: dict[str, Any], words: str) -> None:
    engine = start_engine()
    args = dataclasses.replace(engine.args, folder=str(engine.folder.parent / "other"))
    Path(args.folder).mkdir(mode=0o700)
    os.set_inheritable(engine.control.fd, True)
    done = run_process(dataclasses.replace(args, **damage).to_json())
    assert done.returncode == 3
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_the_control_page_drains(start_engine: StartEngine) -> None:
    engine = start_engine("abcdef", paced=True, own_process=True)
    with engine.client() as client, engine.client() as other:
        events = client.generate("x", max_tokens=6)
        next(events)
        engine.until(lambda: len(engine.requests) == 1)
        engine.control.set_drain()
        engine.until(lambda: other.status().state is EngineState.DRAINING)
        engine.allow(6)
        last = list(events)[-1]
        assert isinstance(last, Done)
        assert last.finish_reason is FinishReason.LENGTH
    assert engine.wait_exit() == 0
    assert list(engine.folder.iterdir()) == []


def test_an_abort_ends_a_drain_at_once(start_engine: StartEngine) -> None:
    engine = start_engine("abcdef", paced=True, own_process=True)
    with engine.client() as client, engine.client() as other:
        events = client.generate("x", max_tokens=6)
        next(events)
        engine.until(lambda: len(engine.requests) == 1)
        engine.control.set_drain()
        engine.until(lambda: other.status().state is EngineState.DRAINING)
        engine.abort(AbortCause.SHUTDOWN, NO_RANK)
        with pytest.raises(RequestFailed) as ended:
            list(events)
        assert ended.value.code == "shutdown"
    assert engine.wait_exit() == 0


def test_a_stray_sigterm_is_no_drain(start_engine: StartEngine) -> None:
    """The launcher stops a coordinator through the control page; a signal is somebody else's, and the end that it is a loss."""
    engine = start_engine("abcdef", paced=True, own_process=True)
    with engine.client() as client:
        events = client.generate("x", max_tokens=6)
        next(events)
        engine.signal_coordinator(signal.SIGTERM)
        with pytest.raises(RequestFailed) as ended:
            list(events)
        assert ended.value.code == "engine_lost"
    assert engine.wait_exit() == -signal.SIGTERM


def test_sigint_is_the_launchers_to_decide_on(start_engine: StartEngine) -> None:
    engine = start_engine("abc", own_process=True)
    with engine.client() as client:
        engine.signal_coordinator(signal.SIGINT)
        assert isinstance(list(client.generate("x", max_tokens=3))[-1], Done)


def test_a_killed_launcher_leaves_nothing_behind(start_engine: StartEngine, tmp_path: Path) -> None:
    """Here the coordinator holds the lease, as it does under kog-launch."""
    engine = start_engine("abc", paced=True)
    instance = Instance.acquire("orphan", tmp_path)
    launcher = subprocess.Popen(["sleep", "1000"])
    args = dataclasses.replace(
        engine.args, folder=str(instance.folder), lease_fd=instance.lease_fd, supervisor_pid=launcher.pid, instance="orphan"
    )  # fmt: skip
    control = ControlPage.create(1, engine.control.max_context)
    args = dataclasses.replace(args, control_fd=control.fd)
    command = [sys.executable, "-m", "kog_dist.workers.coordinator.process", args.to_json()]
    coordinator = subprocess.Popen(command, pass_fds=(control.fd, instance.lease_fd))
    instance.close()
    engine.access = dataclasses.replace(engine.access, address=f"ipc://{tmp_path / 'orphan' / 'rpc.sock'}")
    with engine.client() as client:
        events = client.generate("x")
        next(events)
        launcher.kill()
        launcher.wait(PATIENCE_S)
        with pytest.raises(RequestFailed, match="launcher") as ended:
            list(events)
        assert ended.value.code == "engine_lost"
    assert coordinator.wait(PATIENCE_S) == 4
    assert not (tmp_path / "orphan").exists()
    control.close()


def test_an_idle_coordinator_sleeps(start_engine: StartEngine) -> None:
    """Counted in wake-ups, not in time: at most one every 10 ms of an idle process's life."""
    engine = start_engine(own_process=True)
    with engine.client() as client:
        process = psutil.Process(client.status().pid)
        before, start_s = process.num_ctx_switches().voluntary, time.monotonic()
        threading.Event().wait(0.5)
        switches = process.num_ctx_switches().voluntary - before
        assert switches / (time.monotonic() - start_s) < 200
