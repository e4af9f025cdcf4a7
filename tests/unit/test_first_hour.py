"""`make first-hour` stops at the first step that fails, and says why; the steps themselves take minutes."""

from __future__ import annotations

import pytest

from tests.e2e.first_hour import FirstHour, StepFailed, play


def fail() -> str:
    raise StepFailed("it printed this")


def test_all_steps_and_their_sum_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert play([("one", lambda: "fine"), ("two", lambda: "fine, too")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["one", "two", "all"]
    assert all(line.endswith(" s") or "fine" in line for line in lines)


def test_a_step_that_fails_is_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert play([("one", fail), ("two", lambda: pytest.fail("it is not played"))]) == 1
    said = capsys.readouterr().out
    assert "one" in said
    assert "FAILED" in said
    assert "it printed this" in said


def test_an_hour_has_what_a_user_does(tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [name for name, _ in FirstHour(tmp_path_factory.mktemp("hour")).steps]
    assert [names[0], names[-1], len(names)] == ["clone", "stop", 13]
