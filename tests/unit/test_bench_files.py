"""`kog-bench ... -o FILE`: tables for people and programs, pictures, and refusals before anything is measured."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kog_dist.bench import report
from kog_dist.bench.cli import app
from kog_dist.bench.engine import decode
from kog_dist.bench.files import writing
from kog_dist.bench.kernel import scaling
from kog_dist.bench.shapes import named_spec
from kog_dist.bench.tables import caption, comma_separated, markdown
from kog_dist.errors import ConfigError

DECODE = {
    "benchmark": "decode", "commit": "0123456789ab", "machine": {"cpu": "a CPU", "cores": 2},
    "configuration": {"model": "demo", "prompt_tokens": 16},
    "figures": [
        {"ranks": 1, "tokens_per_s": 1234.567, "tokens_per_s_runs": [1230.0, 1240.0], "ttft_ms": 0.123456, "good": True},
        {"ranks": 2, "tokens_per_s": 2000.0, "tokens_per_s_runs": [2000.0], "ttft_ms": None, "note": "a|b\nc"},
    ],
}  # fmt: skip
LATENCY = {
    "benchmark": "latency", "commit": "c", "machine": {"cpu": "a CPU"}, "configuration": {"gpu": "a GPU", "tokens": 200},
    "figures": [
        *({"lanes": lanes, "context": at, "us_per_token": 900.0 + at / lanes, "ceiling_us": 800.0}
          for lanes in (8, 4) for at in (512, 64)),
        {"lanes": 8, "context": 512, "sampling": "greedy", "us_per_token": 1.0},
        {"baseline": "compiled torch in a CUDA graph", "form": "dense", "context": 512, "us_per_token": 1500.0},
        {"baseline": "compiled torch in a CUDA graph", "form": "lanes", "error": "no"},
    ],
}  # fmt: skip
SCALING = {
    "benchmark": "scaling", "commit": "c", "machine": {}, "configuration": {"gpu": "a GPU"},
    "figures": [
        *({"gpus": gpus, "context": at, "us_per_token": 1000.0 / gpus, "tokens_per_s": 1000.0 * gpus}
          for gpus in (4, 1) for at in (64, 512)),
        {"gpus": 4, "at": 64, "exposed_us": 1.5}, {"gpus": 2, "error": "it failed"},
    ],
}  # fmt: skip
COMPARE = {
    "benchmark": "compare",
    "ratios": [
        {"name": "ttft", "a": 1.0, "b": 1.1, "ratio": 1.1, "low": 1.05, "high": 1.2, "verdict": "slower"},
        {"name": "tpot", "a": 1.0, "b": 1.0, "ratio": 1.0, "low": None, "high": None, "verdict": "too few requests to say"},
    ],
}  # fmt: skip
NOTHING = {**DECODE, "figures": []}


def test_a_table_for_people() -> None:
    assert markdown(DECODE).splitlines() == [
        "kog-bench decode, commit 0123456789ab, a CPU, model demo, prompt tokens 16",
        "",
        "| ranks | tokens per s | ttft ms | good | note |",
        "| ---: | ---: | ---: | --- | --- |",
        "| 1 | 1,234.6 | 0.1235 | yes |  |",
        "| 2 | 2,000.0 |  |  | a\\|b c |",
    ]
    assert markdown(NOTHING) == f"{caption(NOTHING)}: no figures\n"
    assert caption(LATENCY) == "kog-bench latency, commit c, a GPU, tokens 200"


def test_a_table_for_programs() -> None:
    rows = list(csv.DictReader(io.StringIO(comma_separated(DECODE))))
    assert rows == [
        {"ranks": "1", "tokens_per_s": "1234.567", "ttft_ms": "0.123456", "good": "True", "note": ""},
        {"ranks": "2", "tokens_per_s": "2000.0", "ttft_ms": "", "good": "", "note": "a|b\nc"},
    ]
    assert [row["ratio"] for row in csv.DictReader(io.StringIO(comma_separated(COMPARE)))] == ["1.1", "1.0"]


@pytest.mark.parametrize("whole", [DECODE, LATENCY, SCALING, COMPARE], ids=lambda whole: whole["benchmark"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: Mapping[str, Any], suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="draws a picture")
    path = tmp_path / f"a.{suffix}"
    with writing([str(path)]):
        report.print_json(whole)
    assert capsys.readouterr().err == ""
    assert path.stat().st_size > 5000


def drawn_lines(whole: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """By label what is drawn."""
    pytest.importorskip("matplotlib", reason="draws a picture")
    from matplotlib.figure import Figure

    from kog_dist.bench import pictures
    from kog_dist.bench.tables import rows_of

    axes = Figure().subplots()
    pictures._PICTURES[whole["benchmark"]](axes, rows_of(whole))
    return {str(line.get_label()): points_of(line) for line in axes.get_lines()}


def points_of(line: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def test_lines_have_what_was_measured() -> None:
    latency = drawn_lines(LATENCY)
    assert latency["8 lanes"] == [(64, 908.0), (512, 964.0)]
    assert latency["4 lanes, reading the weights alone"] == [(64, 800.0), (512, 800.0)]
    assert latency["torch, dense"] == [(512, 1500.0)]
    assert len(latency) == 5
    measured = drawn_lines(SCALING)
    assert measured["context 512"] == [(1, 1000.0), (4, 4000.0)]


def test_a_prediction_is_drawn_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Mapping[str, Any]] = []
    with report.handing_results_to(found.append):
        scaling.run(named_spec("2b"), "2b", {}, {1: 1000.0}, scaling.Costs())
    lines = drawn_lines(found[0])
    assert lines["measured"] == [(1, 1000.0)]
    assert len(lines["predicted from one GPU"]) == 4


def test_a_result_goes_to_every_file_and_what_fails_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    names = [str(tmp_path / name) for name in ("a.json", "b.png", "c.md", "d.csv")]
    with writing(names):
        report.print_json(NOTHING)
    report.print_json(DECODE)  # behind the block nobody writes
    assert json.loads((tmp_path / "a.json").read_text()) == NOTHING
    assert (tmp_path / "c.md").exists()
    assert (tmp_path / "d.csv").exists()
    captured = capsys.readouterr()
    assert captured.err.startswith(f"kog-bench: {tmp_path}/b.png was not written: ")
    assert [json.loads(line)["benchmark"] for line in captured.out.splitlines()] == ["decode"] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.txt", r"must end with \.md, \.csv, \.json, or for a picture with \.png or \.svg"),
        ("file/a.md", "the folder cannot be made: "),
    ],
)
@pytest.mark.parametrize("command", ["decode", "latency --random", "scaling --model", "scaling", "compare a b"])
def test_what_cannot_be_written_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=words):
        CliRunner().invoke(app, [*command.split(), "-o", name], catch_exceptions=False)


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install matplotlib, or '\.\[bench\]' in a clone"), writing(["a.png"]):
        pass


def test_figures_of_a_dirty_tree_are_not_written_into_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "commit", lambda: f"abc{report.DIRTY}")
    with pytest.raises(ConfigError, match="--dirty"), writing([str(report.RESULTS / "a.md")]):
        pass


def test_a_command_writes_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tokens_per_s", "itl_p50_ms", "itl_p99_ms", "ready_s", "idle_cpu_percent_max", "drafted_tokens")
    monkeypatch.setattr(decode, "_measure", lambda *arguments: {"ranks": 1, **dict.fromkeys((*names, "accepted_tokens"), 1.0)})
    path = tmp_path / "a.csv"
    assert CliRunner().invoke(app, ["decode", "--ranks=1", "-o", str(path)]).exit_code == 0
    assert path.read_text().splitlines()[1] == "1,1.0,1.0,1.0,1.0,1.0,1.0,1.0"
