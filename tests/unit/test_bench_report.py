"""Figures of a tree that is in no commit are marked, and kept out of docs/results."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kog_dist.bench import report
from kog_dist.bench.cli import app
from kog_dist.bench.collectives import run as collectives
from kog_dist.errors import ConfigError


@pytest.fixture
def dirty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(report, "_git", lambda *words: "abcdef123456" if words[0] == "rev-parse" else " M README.md")
    yield
    report.allow_dirty(False)


@pytest.mark.parametrize(("is_terminal", "is_wanted", "comes"), [(True, False, 0), (True, True, 1), (False, False, 1)])
def test_json_comes_where_programs_read(monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_wanted: bool, comes: int) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    report.want_json(is_wanted)
    try:
        report.finish("a", {}, {}, [1])
    finally:
        report.want_json(False)
    assert [json.loads(line)["figures"] for line in stream.getvalue().splitlines() if line.startswith("{")] == [[1]] * comes


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True, timeout=30)


def test_commit_is_marked_by_what_is_in_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, source = tmp_path / "docs" / "results" / "a.json", tmp_path / "source.py"
    result.parent.mkdir(parents=True)
    for path in (result, source):
        path.write_text("1\n", encoding="utf-8")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(report, "_FOLDER", result.parent)
    clean = report.commit()
    assert len(clean) >= 12
    result.write_text("", encoding="utf-8")  # as the shell empties it for `> docs/results/a.json`
    assert report.commit() == clean
    source.write_text("2\n", encoding="utf-8")
    assert report.commit() == clean + "+changes"


@pytest.mark.usefixtures("dirty")
def test_figures_of_a_dirty_tree_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report.finish("decode", {}, {}, {})
    *said, last = capsys.readouterr().out.splitlines()
    assert "not for publication" in said[0]
    assert json.loads(last)["commit"] == "abcdef123456+changes"


@pytest.mark.usefixtures("dirty")
def test_a_dirty_tree_writes_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []

    def run(*_: Any, folder: str, **__: Any) -> bool:
        begun.append(folder)
        return True

    monkeypatch.setattr(collectives, "run", run)
    inside = str(report.RESULTS / "new")
    refused = CliRunner().invoke(app, ["collectives", "--out", inside])
    assert isinstance(refused.exception, ConfigError)
    assert "--dirty" in str(refused.exception)
    for words in (["--dirty", "collectives", "--out", inside], ["collectives", "--out", "elsewhere"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert begun == [inside, "elsewhere"]


def test_a_clean_tree_writes_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_git", lambda *words: "abcdef123456" if words[0] == "rev-parse" else "")
    report.check_destination(report.RESULTS / "a.json", None)


@pytest.mark.usefixtures("dirty")
def test_standard_output_is_a_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    kept = os.dup(1)
    try:
        with (tmp_path / "a.json").open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            with pytest.raises(ConfigError, match=r"a\.json would get figures"):
                report.check_stdout()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
