"""Files of an instance folder and of the logs: whatever they hold, a reader has the whole thing or says that there is none."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kog_dist.config import MAX_TIMEOUT_S
from kog_dist.doctor.instances import instances
from kog_dist.errors import KogError
from kog_dist.rpc import instance_commands
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.transport import Access
from kog_dist.runtime.http_file import HTTP_FILE, HttpFile
from kog_dist.runtime.instance import LEASE_FILE, Instance, LeaseHolder, process_start_time, read_holder
from kog_dist.runtime.launcher_file import LAUNCHER_FILE, LauncherFile
from kog_dist.system.files import EXIT_FILE

VALUES: tuple[Any, ...] = (
    "x", "", "1", "\0", "\ud800", "x" * 70_000, None, True, False, 0, -1, 1, 2**22 + 1, 2**31, 2**64, 10**400, 0.5, -0.0, 1e308,
    float("nan"), float("inf"), [], {}, [1], {"a": 1}, "/\0", "../..", "\x1b[2J",
)  # fmt: skip
SOME = {"pid": 1, "start_time": 1, "command": "kog-launch"}
LAUNCHER = {"pid": 1, "start_time": 1, "shutdown_timeout_s": 1.0, "log_dir": None, "instance": "x"}
KINDS = {"log_dir": str | None, "shutdown_timeout_s": int | float}
HTTP = {"url": "http://127.0.0.1:8000", "pid": 1, "serves": True}


def variants(whole: dict[str, Any]) -> Iterator[str]:
    """The object with each value in each place, with one less and one more, and what is no object."""
    for name in whole:
        yield from (json.dumps(whole | {name: value}) for value in VALUES)
        yield json.dumps({key: value for key, value in whole.items() if key != name})
        yield json.dumps(whole)[:-1] + f', "{name}": 1}}'
    yield from (json.dumps(whole | {"more": 1}), "", "{", "[]", "null", "1", '"x"', "[" * 100_000, "\0", "{}", "1e999")
    yield json.dumps(whole) + " " * (1 << 20)


@pytest.mark.parametrize(
    ("name", "whole", "read"),
    [(LEASE_FILE, SOME, read_holder), (LAUNCHER_FILE, LAUNCHER, LauncherFile.read), (HTTP_FILE, HTTP, HttpFile.read)],
)
def test_what_is_read_is_of_its_types_or_nothing(
    tmp_path: Path, name: str, whole: dict[str, Any], read: Callable[[Path], Any]
) -> None:
    kinds = {key: type(value) for key, value in whole.items()}
    (tmp_path / name).write_text(json.dumps(whole))
    assert read(tmp_path) is not None
    for text in variants(whole):
        (tmp_path / name).write_text(text)
        if (found := read(tmp_path)) is not None:
            values = asdict(found)
            assert all(isinstance(values[key], KINDS.get(key, kind)) for key, kind in kinds.items())
            assert 0 < found.pid <= 2**22
    (tmp_path / name).write_bytes(b"\xff")
    assert read(tmp_path) is None
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert read(tmp_path) is None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of an instance that runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    instance = Instance.acquire("x")
    yield instance.folder
    instance.remove()


def test_commands_end_with_a_sentence_whatever_the_launcher_has_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_commands, "ask_to_stop", lambda pidfd, *, at_once: None)  # it may be this very process
    monkeypatch.setattr(instance_commands, "STOP_MARGIN_S", 0.0)
    monkeypatch.setattr(instance_commands, "FOLLOW_S", 0.0)
    mine = {"pid": os.getpid(), "start_time": process_start_time(os.getpid())}
    for text in variants(LAUNCHER | mine | {"shutdown_timeout_s": 0.0, "log_dir": str(folder)}):
        (folder / LAUNCHER_FILE).write_text(text)
        for command in (
            lambda: instance_commands.stop("x", at_once=True),
            lambda: instance_commands.logs("x", None, num_lines=1, follow=False),
            lambda: instance_commands.NamedEngine.find("y"),
        ):
            try:
                command()
            except KogError:
                continue


def test_the_doctor_lists_an_engine_whatever_its_lease_says(folder: Path) -> None:
    for text in variants(SOME):
        (folder / LEASE_FILE).write_text(text)
        assert any("running: x, " in finding.text for finding in instances())


def test_the_end_of_a_run_is_a_sentence_or_nothing(tmp_path: Path) -> None:
    for text in variants({"sentence": "it ended", "exit_code": 4}):
        (tmp_path / EXIT_FILE).write_text(text)
        assert isinstance(instance_commands.last_sentence(tmp_path), str | None)
    (tmp_path / EXIT_FILE).write_text('{"sentence": "it ended", "more": [1]}')
    assert instance_commands.last_sentence(tmp_path) == "it ended"


def test_an_access_file_is_one_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / ACCESS_NAME
    key = "x" * 40
    for text in variants({"address": "tcp://127.0.0.1:1", "server_public": key, "client_public": key, "client_secret": key}):
        path.write_text(text)
        path.chmod(0o600)
        with contextlib.suppress(KogError):
            assert all(isinstance(value, str | None) for value in asdict(Access.from_file(path)).values())


def test_a_holder_is_alive_as_that_very_process_alone() -> None:
    """Pids are used again."""
    started = process_start_time(os.getpid())
    assert started is not None
    assert LeaseHolder(os.getpid(), started, "kog-launch").alive()
    assert not LeaseHolder(os.getpid(), started + 1, "kog-launch").alive()


def test_a_launcher_ends_within_the_longest_time_that_a_setting_may_name() -> None:
    for shutdown_s in (0.0, 1.5, MAX_TIMEOUT_S):
        assert LauncherFile.of_this_process("a", shutdown_s, None).shutdown_timeout_s == shutdown_s
    for shutdown_s in (-0.1, MAX_TIMEOUT_S + 0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="to end"):
            LauncherFile.of_this_process("a", shutdown_s, None)
