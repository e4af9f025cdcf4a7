"""`python -m tests.gpu.run --publish` and `python -m tests.gpu.publish`: rows of one commit and card, and pages made of them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kog_dist.errors import ConfigError
from kog_dist.hardware.gpus import Gpu
from tests.gpu.publish import __main__ as command
from tests.gpu.publish import measure, pages, runs
from tests.gpu.publish.figures import FiguresOf
from tests.gpu.publish.publication import Publication, number, verdict, verdicts
from tests.gpu.publish.rows import SHAPES, PublishedRow, calls_of, rows_left, rows_on, seconds_of
from tests.gpu.publish.runs import MeasuredRow, MeasuredRun, append_rows, begin_run, read_run
from tests.gpu.publish.tables import models, readme
from tests.gpu.run import Result
from tests.gpu.steps import Step

H200, COMMIT = "NVIDIA H200", "0123456789ab"
GPUS = [Gpu(index, f"GPU-{index}", H200, f"0000:0{index}:00.0") for index in range(2)]


def scaling(us: float, numbers: Sequence[int]) -> Mapping[str, Any]:
    """What `kog-bench scaling --memory-alone` prints of a shape."""
    figures = [
        {
            "gpus": gpus,
            "context": context,
            "us_per_token": us / gpus,
            "memory_us": 0.9 * us / gpus,
            "same_bits": True,
            "repeats": 5,
        }
        for gpus in numbers
        for context in (64, 512, 4000, 8000)
    ]
    return {"benchmark": "scaling", "configuration": {"gpu": H200}, "figures": figures}


def run_of(
    commit: str, date: str, numbers: Sequence[int], us: float = 2000.0, shapes: Sequence[str] = tuple(SHAPES)
) -> MeasuredRun:
    rows = [MeasuredRow(f"decode_{shape}", max(numbers), 1.0, scaling(us, numbers)) for shape in ("2b", *shapes)]
    return MeasuredRun(f"run-{commit}", commit, date, H200, tuple(rows))


def folder_of(parent: Path, *lines: Mapping[str, Any], commit: str = COMMIT) -> Path:
    folder = parent / "run"
    folder.mkdir(parents=True)
    about = {"commit": commit, "date": "2026-11-29T01:00", "sources": "0"}
    (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def line(row: str, commit: str = COMMIT, card: str = H200) -> dict[str, Any]:
    return {"row": row, "gpus": 2, "commit": commit, "card": card, "seconds": 1.0, "result": scaling(2000, (2, 1))}


# ---- pages ----
@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_pages_are_what_the_raw_results_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert pages.blocks_of(text), "it has no block"
    assert pages.written(page, text, Publication.read()) == text, "run python -m tests.gpu.publish"


def test_every_block_is_in_a_page() -> None:
    found = [name for page in pages.PAGES for name in pages.blocks_of(page.read_text(encoding="utf-8"))]
    assert sorted(found) == sorted(pages.BLOCKS)


def test_an_unknown_block_is_refused() -> None:
    text = "<!-- figures nonsense: python -m tests.gpu.publish -->\nold\n<!-- end of figures -->\n"
    with pytest.raises(ConfigError, match="there is no block nonsense"):
        pages.written(Path("page.md"), text, Publication((), {}, {}))


def test_figures_of_others_stand_in_blocks_alone() -> None:
    publication = Publication.read()
    quoted = {f"{one['us']:,}" for one in publication.peers["published"]}
    for path in [runs.ROOT / "README.md", *(runs.ROOT / "docs").glob("*.md")]:
        outside = re.sub(r"<!-- figures .*?<!-- end of figures -->", "", path.read_text(encoding="utf-8"), flags=re.S)
        names = re.findall(r"\b(?:Hoid|mkc|Hazy)\b", outside)
        assert not names, f"{path.name} names {names}: quote them in docs/results/peers.toml"
        assert not quoted & set(re.findall(r"(?<![\d,])[\d,]+\d", outside)) - {"760"}, path.name


def test_every_published_figure_has_its_conditions() -> None:
    for one in Publication.read().peers["published"]:
        assert all(one[name] for name in ("engine", "conditions", "us", "context"))
        assert one["gpu"] in ("H200", "H100")
        assert one["shape"] in SHAPES
        assert not one["source"] or one["source"].startswith("https://")


# ---- tables ----
def test_a_table_has_one_commit_and_others_have_their_own() -> None:
    """A newer run of one GPU does not get the columns of an older one of four."""
    stored = Publication.read()
    older, newer = run_of("0ld0ld0", "2026-11-01", (4, 2, 1)), run_of("fee1dea", "2026-11-02", (1,), us=1000.0)
    lines = readme(replace(stored, runs=[newer, older]))
    assert lines[0] == "| us per token at context 512, commit fee1dea | one H200 | memory alone, one | best published |"
    assert "| Llama-3.1-8B | 1,000 | 900 | torch 4,980 |" in lines
    text = " ".join(lines)
    assert "At 0ld0ld0, row by row: two H200s **1,000**, 1,000, 1,000, 1,000, 1,000; four H200s 500, 500, 500, 500, 500." in text
    lines = readme(replace(stored, runs=[run_of("fee1dea", "2026-11-02", (2, 1)), older]))
    assert "| us per token at context 512, commit fee1dea | one H200 | two | memory alone, one | best published |" in lines


def test_missing_rows_are_said_and_newer_ones_stand_below() -> None:
    stored = Publication.read()
    some = [shape for shape in SHAPES if shape != "gpt-oss-20b"]
    whole, later = (
        run_of("0ld0ld0", "2026-11-01", (2, 1), shapes=some),
        run_of("fee1dea", "2026-11-02", (1,), 1500.0, ["qwen3-8b"]),
    )
    text = "\n".join(models(replace(stored, runs=[later, whole])))
    assert "Not measured at this commit: gpt-oss-20b, MXFP4." in text
    assert "Measured since, on one, two and four: at fee1dea Qwen3-8B 1,500." in text
    assert "| Qwen3-8B | 1,800 | 2,000 / 2,000 | 1,000 / 1,000 | 90, 90 | 3,530 / 1,820 | met |" in text
    assert "| gpt-oss-120b, MXFP4 | 1,800 | **2,000** / 2,000 | 1,000 / 1,000 | 90, 90 | 1,400 / 1,050 |" in text


def test_figures_of_a_row_with_more_gpus_count() -> None:
    run = run_of(COMMIT, "2026-11-01", (1,), 1000.0)
    both = replace(run, rows=(*run.rows, MeasuredRow("decode_qwen3-8b", 2, 1.0, scaling(1100.0, (2, 1)))))
    assert FiguresOf(both).us("qwen3-8b", 1, 512) == 1100.0
    assert FiguresOf(run).us("qwen3-8b", 1, 512) == 1000.0
    assert FiguresOf(run).us("qwen3-8b", 2, 512) is None


def test_numbers_and_verdicts() -> None:
    assert [number(1106.5), number(-0.04, 1), number(None), number(2.675, 2)] == ["1,107", "0.0", "", "2.68"]
    assert [verdict(99, 100), verdict(102.24, 100), verdict(99, 100, least=True), verdict(1, None)] == [
        "met", "**missed** by 2.2 %", "**missed** by 1.0 %", "",
    ]  # fmt: skip
    assert [verdicts(["met", "met"]), verdicts(["met", "", "no"]), verdicts([])] == ["met", "met; no", ""]


# ---- folders ----
def test_a_folder_of_two_commits_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, line("decode_2b"), line("decode_qwen3-8b", commit="feedfacecafe"))
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2: row decode_qwen3-8b on 2 GPUs is of commit feedfacecafe, the folder of 0123"
    ):
        read_run(folder)


def test_a_folder_of_two_kinds_of_cards_is_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, line("decode_2b"), line("lanes_2b", card="NVIDIA H100 80GB HBM3"))
    with pytest.raises(
        ConfigError, match=r"rows.jsonl:2: row lanes_2b on 2 GPUs is of NVIDIA H100 80GB HBM3, those before of NVIDIA"
    ):
        read_run(folder)


def test_what_is_no_commit_or_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no commit"):
        read_run(folder_of(tmp_path / "dirty", commit=f"{COMMIT}+changes"))
    with pytest.raises(ConfigError, match=r"is no run: it has no run.json"):
        read_run(tmp_path)
    folder = folder_of(tmp_path / "named", {**line("decode_2b"), "file": "scaling-2-h200.json"})
    text = (folder / "rows.jsonl").read_text(encoding="utf-8")
    (folder / "rows.jsonl").write_text(text.replace('"result"', '"other"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no result"):
        read_run(folder)


def test_the_first_of_two_measurements_counts(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, line("decode_2b"), {**line("decode_2b"), "result": scaling(1.0, (2, 1))})
    run = read_run(folder)
    assert FiguresOf(run).us("2b", 1, 512) == 2000.0
    assert [where.partition("rows.jsonl")[2] for where in run.again] == [":2: row decode_2b on 2 GPUs"]
    assert "measured again" in "\n".join(command.report(run))


def test_a_report_says_which_rows_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path, line("decode_2b"))
    said = command.report(read_run(folder))
    missing = [f"  missing: {row.name} on {row.gpus} GPUs" for row in rows_on(2) if row.name != "decode_2b"]
    assert said[1:] == missing
    with pytest.raises(SystemExit) as ended:
        command.main([str(folder)])
    assert ended.value.code == 2
    assert "move it into docs/results/runs" in capsys.readouterr().err


def test_stored_runs_have_rows_of_known_names() -> None:
    """So that no row is in a folder and in no table. Shapes that have no row in a table are allowed."""
    names = {row.name for row in rows_on(4)}
    for run in Publication.read().runs:
        found = {row.name for row in run.rows}
        assert found, run.name
        assert all(name in names or name.removeprefix("decode_").partition("+")[0] in SHAPES for name in found), run.name


# ---- measuring ----
def printing(outcomes: Mapping[str, str], begun: list[str], card: str = H200) -> measure.RunSteps:
    """Plays `tests.gpu.run.run`: each benchmark prints an object, but those with another outcome."""

    def run_steps(steps: Mapping[str, Step], gpus: Sequence[Gpu], out: Path) -> list[Result]:
        ((name, _),) = steps.items()
        begun.append(name)
        out.mkdir(parents=True, exist_ok=True)
        outcome = outcomes.get(name, "ok")
        if outcome == "ok" and name == "lost":
            text = '.\n{"gpus": 2, "signal": "SIGKILL", "lost": 3, "from_to": {"error_s": [0.01, 0.02], "clean_s": [1.0, 1.1]}}\n'
            (out / "lost.log").write_text(text, encoding="utf-8")
        elif outcome == "ok":
            whole = {**scaling(2000, (2, 1)), "configuration": {"gpu": card}}
            (out / f"{name}.json").write_text(json.dumps(whole), encoding="utf-8")
        return [Result(name, outcome, 3.0)]

    return run_steps


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], MeasuredRun]:
    """The run in tmp_path/raw, as a call finds it."""
    monkeypatch.setattr(runs, "commit", lambda: COMMIT)
    monkeypatch.setattr(runs, "sources_digest", lambda: "abc")
    return lambda: begin_run(tmp_path / "raw")


def test_calls_gather_all_rows(tmp_path: Path, begun: Callable[[], MeasuredRun], capsys: pytest.CaptureFixture[str]) -> None:
    """The second call measures what the first had no time for, and what failed; the third has nothing to do."""
    steps = list[str]()
    outcomes = {"collectives": "code 1"}
    first = measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 50.0, printing(outcomes, steps), cores=1000)
    done = {(row.name, row.gpus) for row in begun().rows}
    assert first == 0
    assert steps[:2] == ["prebuild", "decode_2b"]
    assert ("endurance", 2) not in done, "it takes longer than the call"
    assert ("decode_2b", 2) in done
    assert "call it again for: " in capsys.readouterr().out
    assert measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 1e6, printing(outcomes, steps)) == 1
    assert rows_left(2, {(row.name, row.gpus) for row in begun().rows}) == [
        row for row in rows_on(2) if row.name == "collectives"
    ]
    assert "collectives on 2 GPUs: code 1" in capsys.readouterr().out
    assert measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 1e6, printing({}, steps)) == 0
    assert measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 1e6, printing({}, steps)) == 0
    assert "all 24 rows of 2 GPUs are there" in capsys.readouterr().out
    assert len(steps) == len(set(steps) - {"prebuild"}) + 3 + 2, "requests of two numbers of GPUs, collectives again"
    run = begun()
    assert (run.commit, run.card, len(run.rows)) == (COMMIT, H200, 24)
    assert FiguresOf(run).lost(2)["SIGKILL"]["lost"] == 3


def test_rows_of_another_card_do_not_count(
    tmp_path: Path, begun: Callable[[], MeasuredRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run_steps = printing({}, [], card="NVIDIA H100 80GB HBM3")
    assert measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 1e6, run_steps) == 1
    assert {row.name for row in begun().rows} == {"lost"}, "its tests print no card"
    assert "decode_2b on 2 GPUs: it is of NVIDIA H100 80GB HBM3" in capsys.readouterr().out
    run = begun()
    with pytest.raises(ConfigError, match=r"raw has rows of NVIDIA H200, and here are NVIDIA H100"):
        measure.card_of([replace(GPUS[0], name="NVIDIA H100 80GB HBM3")], run)
    with pytest.raises(ConfigError, match=r"GPUs of one kind, and there are NVIDIA H100, NVIDIA H200"):
        measure.card_of([*GPUS, replace(GPUS[0], name="NVIDIA H100")], run)
    with pytest.raises(ConfigError, match="there are none"):
        measure.card_of([], run)


def test_a_row_with_a_part_that_failed_does_not_count(tmp_path: Path, begun: Callable[[], MeasuredRun]) -> None:
    def run_steps(steps: Mapping[str, Step], gpus: Sequence[Gpu], out: Path) -> list[Result]:
        ((name, _),) = steps.items()
        out.mkdir(parents=True, exist_ok=True)
        if name == "requests":  # the second one prints nothing
            if not begun().results("requests"):
                (out / "requests.json").write_text(json.dumps(scaling(2000, (2,))), encoding="utf-8")
        elif name != "prebuild":
            figures = [*scaling(2000, (1,))["figures"], {"gpus": 2, "error": "a rank is lost"}]
            (out / f"{name}.json").write_text(json.dumps({"benchmark": name, "figures": figures}), encoding="utf-8")
        (out / "lost.log").write_text("failed\n", encoding="utf-8")
        return [Result(name, "ok", 3.0)]

    assert measure.measure(tmp_path / "raw", begun(), GPUS, tmp_path / "logs", 1e6, run_steps) == 1
    assert [(row.name, row.gpus) for row in begun().rows] == [("requests", 2)]


def test_a_run_begins_with_a_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "sources_digest", lambda: "abc")
    for source in (f"{COMMIT}+changes", "0.1.0"):
        monkeypatch.setattr(runs, "commit", lambda source=source: source)
        with pytest.raises(ConfigError, match=re.escape(f"this tree is {source}, and figures are published of a commit alone")):
            begin_run(tmp_path / "raw")
    monkeypatch.setattr(runs, "commit", lambda: COMMIT)
    assert begin_run(tmp_path / "raw").commit == COMMIT
    monkeypatch.setattr(runs, "commit", lambda: "0.1.0")  # where there is no git, the sources tell
    assert begin_run(tmp_path / "raw").commit == COMMIT
    monkeypatch.setattr(runs, "sources_digest", lambda: "def")
    with pytest.raises(ConfigError, match=rf"is a run of commit {COMMIT}, whose sources are not those of this tree \(0.1.0\)"):
        begin_run(tmp_path / "raw")


def test_the_digest_is_of_all_sources_and_of_nothing_else(tmp_path: Path) -> None:
    for folder in ("kog_dist", "collectives", "launch", "workers", "tests/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    source = tmp_path / "workers" / "kernel.cu"
    source.write_text("one", encoding="utf-8")
    (tmp_path / "kog_dist" / "workers").symlink_to("../workers")
    first = runs.sources_digest(tmp_path)
    (tmp_path / "workers" / "notes.txt").write_text("nothing", encoding="utf-8")
    assert runs.sources_digest(tmp_path) == first
    source.write_text("two", encoding="utf-8")
    assert runs.sources_digest(tmp_path) != first


def test_a_dry_run_says_what_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = argparse.Namespace(publish=tmp_path / "raw", dry_run=True, begin=False, budget_s=540.0, gpus=None, out=tmp_path)
    assert measure.publish(flags, GPUS, printing({}, [])) == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "raw").exists()
    assert len(re.findall(r"== call \d: ", text)) == 2
    assert re.search(r"about \d+ s in 2 calls of at most 540 s, on 2 GPUs and 32 cores", text)


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_rows_fit_into_three_calls(gpus: int) -> None:
    """Of ten minutes each, on machines that begin bare; and into half an hour with the start of each machine."""
    calls = calls_of(rows_on(gpus), 16 * gpus)
    assert len(calls) <= 3
    assert all(seconds_of(rows, 16 * gpus) <= 540 for rows in calls)
    assert sum(seconds_of(rows, 16 * gpus) + 120 for rows in calls) <= 1800
    keys = [row.key for row in rows_on(gpus)]
    assert len(keys) == len(set(keys))


def test_a_call_with_too_little_time_takes_one_row_at_least() -> None:
    rows: list[PublishedRow] = rows_on(1)
    assert [len(call) for call in calls_of(rows, 16, call_s=0.0)] == [1] * len(rows)


def test_rows_are_written_as_they_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    row = MeasuredRow("decode_2b", 2, 12.5, scaling(2000, (2, 1)))
    append_rows(folder, "later.jsonl", read_run(folder), H200, row)
    assert read_run(folder).rows == (row,)
