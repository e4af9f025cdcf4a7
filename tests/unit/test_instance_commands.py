"""`kog-client stop` and `logs`, against processes that stand for a launcher."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.rpc import instance_commands
from kog_dist.rpc.instance_commands import logs, stop
from kog_dist.runtime import launcher_file
from kog_dist.runtime.instance import Instance, process_start_time
from kog_dist.runtime.launcher_file import LauncherFile

Launcher = subprocess.Popen[bytes]
StartLauncher = Callable[..., Launcher]
_COUNTS = """
import signal, sys
stopping = {signal.SIGTERM, signal.SIGINT}
signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
print("ready", flush=True)
for _ in range(int(sys.argv[1])):
    signal.sigwait(stopping)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the engine `default`, of a user without others."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = tmp_path / "kog" / "default"
    made.mkdir(parents=True, mode=0o700)
    made.parent.chmod(0o700)
    return made


@pytest.fixture
def start(folder: Path, tmp_path: Path) -> Iterator[StartLauncher]:
    """Starts a launcher that ends after so many stop signals."""
    started: list[Launcher] = []

    def launcher(num_signals: int, *, log_dir: Path | None = None, on_ray: bool = False) -> Launcher:
        process = subprocess.Popen([sys.executable, "-c", _COUNTS, str(num_signals)], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        start_time = process_start_time(process.pid)
        assert start_time is not None
        own = folder.parent / f"ray-{process.pid}" if on_ray else folder
        own.mkdir(exist_ok=True)
        LauncherFile(process.pid, start_time, 0.2, None if log_dir is None else str(log_dir), "default").write(own)
        return process

    yield launcher
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_stop_waits_for_the_end(start: StartLauncher, capsys: pytest.CaptureFixture[str], at_once: bool) -> None:
    process = start(2 if at_once else 1)
    assert stop(None, at_once=at_once) == 0
    assert process.wait(10) == 0
    assert capsys.readouterr().out.startswith("engine default has stopped after ")


def test_stop_says_how_a_run_failed(start: StartLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "exit.json").write_text('{"sentence": "the request was cut off"}')
    start(1, log_dir=tmp_path)
    assert stop("default", at_once=False) == 0
    assert capsys.readouterr().err == "kog-client: its last words: the request was cut off\n"


@pytest.mark.parametrize(("at_once", "remedy"), [(False, "kog-client stop --now"), (True, "kill -KILL ")])
def test_stop_gives_up_with_a_remedy(start: StartLauncher, monkeypatch: pytest.MonkeyPatch, at_once: bool, remedy: str) -> None:
    monkeypatch.setattr(instance_commands, "STOP_MARGIN_S", 0.1)
    process = start(3)
    with pytest.raises(LaunchError, match=rf"pid {process.pid}\) has not ended after 0\.[13] s; end it with {remedy}"):
        stop(None, at_once=at_once)
    assert process.poll() is None


def test_a_process_that_has_the_number_of_a_launcher_is_left_alone(start: StartLauncher, folder: Path) -> None:
    process = start(1)
    LauncherFile(process.pid, 1, 0.2, None, "default").write(folder)
    with pytest.raises(LaunchError, match="no engine of the name 'default' runs here"):
        stop(None, at_once=True)
    assert process.poll() is None


def test_engines_of_other_starters_are_not_killed(folder: Path) -> None:
    lease = Instance.acquire("default", folder.parent)
    try:
        with pytest.raises(LaunchError, match="was not started by a kog-launch of this machine; kog-client drain"):
            stop(None, at_once=True)
    finally:
        lease.remove()


def test_a_launcher_whose_engine_ray_has_placed_is_found_by_the_engines_name(
    start: StartLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "elsewhere", "launcher.log", "there")
    first = start(1, log_dir=tmp_path / "elsewhere", on_ray=True)
    assert logs(None, None, num_lines=1, follow=False) == 0
    assert capsys.readouterr().out == "there\n"
    second = start(1, on_ray=True)
    with pytest.raises(ConfigError, match=rf"several launchers .* --instance ray-({first.pid}|{second.pid}) or ray-"):
        stop(None, at_once=False)
    assert stop(f"ray-{second.pid}", at_once=False) == 0
    assert (first.poll(), second.wait(10)) == (None, 0)
    with pytest.raises(LaunchError, match=r"no engine of the name 'other' runs here; .* --ray ADDRESS looks on a Ray cluster"):
        stop("other", at_once=False)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden"])
def test_names_are_no_paths(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a name, not a path"):
        stop(name, at_once=False)
    with pytest.raises(ConfigError, match="must be a name, not a path"):
        logs(name, None, num_lines=1, follow=False)


def test_a_damaged_file_counts_as_none(folder: Path) -> None:
    for text in ("", "[]", "{}", '{"pid": 1}', "\xff"):
        (folder / launcher_file.LAUNCHER_FILE).write_text(text, encoding="latin-1")
        assert LauncherFile.read(folder) is None


# ---- logs ----
def written(folder: Path, name: str, *lines: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_logs_are_there_after_the_end(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "state" / "kog" / "logs" / "default"
    with pytest.raises(LaunchError, match="there are no logs of an engine 'default' in "):
        logs(None, None, num_lines=5, follow=True)
    written(kept, "launcher.log.1", "a", "b", "c")
    written(kept, "launcher.log", "d", "e")
    written(kept, "r0/rank-0.log", "of a replica")
    for num_lines, shown in ((0, ""), (1, "e\n"), (2, "d\ne\n"), (4, "b\nc\nd\ne\n"), (9, "a\nb\nc\nd\ne\n")):
        assert logs(None, None, num_lines=num_lines, follow=False) == 0
        assert capsys.readouterr().out == shown
    assert logs(None, "r0/rank-0", num_lines=1, follow=True) == 0, "nobody writes any more, so nobody is waited for"
    assert capsys.readouterr().out == "of a replica\n"
    with pytest.raises(ConfigError, match=r"there is no log of '\.\./x' in .*; there are launcher, r0/rank-0"):
        logs(None, "../x", num_lines=1, follow=False)


def test_logs_of_a_running_engine_are_where_it_writes_them(
    start: StartLauncher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "elsewhere", "launcher.log", "there")
    start(1, log_dir=tmp_path / "elsewhere")
    assert logs(None, None, num_lines=1, follow=False) == 0
    assert capsys.readouterr().out == "there\n"
    start(1)
    with pytest.raises(LaunchError, match="engine default keeps no logs"):
        logs(None, None, num_lines=1, follow=False)


def test_what_is_written_is_followed_through_new_files_until_the_end(
    start: StartLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "logs", "launcher.log", "before", "last")
    process = start(1, log_dir=tmp_path / "logs")

    def more() -> None:
        with path.open("a") as file:
            file.write("news\n")

    def goes_on_as_a_new_file() -> None:
        with path.open("a") as file:
            file.write("end of the old file\n")
        path.replace(f"{path}.1")
        written(path.parent, path.name, "begin of the new file")

    def is_being_renamed() -> None:
        path.replace(f"{path}.1")

    def is_there_again() -> None:
        written(path.parent, path.name, "third file")

    def is_emptied() -> None:
        written(path.parent, path.name, "4")

    def ends() -> None:
        more()
        process.send_signal(signal.SIGTERM)
        process.wait(10)

    steps = iter([more, goes_on_as_a_new_file, is_being_renamed, is_there_again, is_emptied, ends])
    real = select.select

    def between_two_looks(reads: list[int], writes: list[int], errors: list[int], limit_s: float) -> object:
        next(steps)()
        return real(reads, writes, errors, 0 if process.poll() is None else limit_s)

    monkeypatch.setattr(select, "select", between_two_looks)
    assert logs(None, None, num_lines=1, follow=True) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "last", "news", "end of the old file", "begin of the new file", "third file", "4", "news"
    ]  # fmt: skip


def test_a_reader_that_has_enough_is_no_failure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "state" / "kog" / "logs" / "default", "launcher.log", "line")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert logs(None, None, num_lines=1, follow=False) == 0
