"""Logs of the launcher: where they are unless it is told where, who may write there, and how they stay bounded."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.launch import events
from kog_dist.launch.events import EventLog, LogFile
from kog_dist.system.files import EXIT_FILE


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder for what outlives a run."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def numbers_in(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines() if line.isdigit()]


def test_a_log_that_grows_goes_on_as_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 100)
    log = LogFile(tmp_path, "rank 0")
    for number in range(1000, 1120):
        log.write(f"{number}\n".encode())
    log.close()
    paths = [tmp_path / "rank-0.log", *(tmp_path / f"rank-0.log.{age}" for age in range(1, events.NUM_OLDER + 1))]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert all(0 < path.stat().st_size <= 100 for path in paths)
    kept = list(itertools.chain.from_iterable(numbers_in(path) for path in reversed(paths)))
    assert kept == list(range(1120 - len(kept), 1120)), "the newest lines, none missing between them"


def test_a_line_longer_than_a_file_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 100)
    log = LogFile(tmp_path, "gateway")
    log.write(b"x" * 500 + b"\n")
    log.write(b"next\n")
    log.close()
    assert (tmp_path / "gateway.log").read_text() == "next\n"
    assert (tmp_path / "gateway.log.1").read_text() == "x" * 500 + "\n"


def test_a_second_run_counts_what_the_first_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 300)
    for _ in range(2):
        log = LogFile(tmp_path, "rank 0")
        log.write(b"y" * 150)
        log.close()
    assert (tmp_path / "rank-0.log.1").exists()


def test_an_engine_that_serves_has_logs_of_its_name(state: Path) -> None:
    with EventLog.of_run(LaunchConfig(instance="prod"), serves=True) as kept:
        kept.note("a line")
    assert kept.log_dir == state / "kog" / "logs" / "prod"
    assert (kept.log_dir / "launcher.log").read_text().endswith(" a line\n")
    with EventLog.of_run(LaunchConfig(), serves=True) as kept:
        assert kept.log_dir == state / "kog" / "logs" / "default"
    with EventLog.of_run(LaunchConfig(), serves=False) as none:
        assert none.log_dir is None, "one answer leaves nothing behind"


def test_a_second_engine_of_the_name_leaves_the_logs_of_the_first_alone(state: Path) -> None:
    with EventLog.of_run(LaunchConfig(), serves=True) as first:
        assert first.log_dir is not None
        (first.log_dir / EXIT_FILE).write_text("of the first")
        with EventLog.of_run(LaunchConfig(), serves=True) as second:
            second.note("not here")
        assert second.log_dir is None
        assert second.without == f"none: another engine writes into {first.log_dir}; --log-dir FOLDER keeps them elsewhere"
        assert (first.log_dir / EXIT_FILE).read_text() == "of the first"
        assert "not here" not in (first.log_dir / "launcher.log").read_text()
    with EventLog.of_run(LaunchConfig(), serves=True) as third:
        assert third.log_dir == first.log_dir


@pytest.mark.parametrize("is_given", [False, True])
def test_a_folder_that_was_asked_for_is_used_or_refused(state: Path, tmp_path: Path, is_given: bool) -> None:
    state.write_text("a file")
    given = str(tmp_path / "logs") if is_given else None
    with EventLog.of_run(LaunchConfig(log_dir=given), serves=True) as kept:
        assert (kept.log_dir is not None) is is_given
    if not is_given:
        assert "Not a directory" in kept.without


@pytest.mark.parametrize("has_terminal", [False, True])
def test_a_failure_says_at_a_terminal_where_more_is_said(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has_terminal: bool
) -> None:
    monkeypatch.setattr(events, "is_terminal", lambda stream: has_terminal)
    with EventLog.of_run(LaunchConfig(), serves=True) as kept:
        kept.say_end("rank 1 was killed")
    where = f"kog-launch: the logs are in {kept.log_dir}\n" if has_terminal else ""
    assert capsys.readouterr().err == f"kog-launch: rank 1 was killed\n{where}"
    assert kept.log_dir is not None
    assert (kept.log_dir / "launcher.log").read_text().endswith(" rank 1 was killed\n")


def test_without_a_home_there_are_no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(_cls: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(no_home))
    with EventLog.of_run(LaunchConfig(), serves=True) as none:
        assert none.log_dir is None
        none.note("said to nobody")
