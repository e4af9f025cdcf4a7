"""Gathers the rows of a run in a folder, by as many calls as it takes: `python -m tests.gpu.run --publish RAW_DIR`.

A call measures the rows that the folder lacks, until its time is over; each is written down as soon as it is there. A row counts
if its step ended well, on the kind of card that the folder has.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_dist.errors import ConfigError
from kog_dist.hardware.gpus import Gpu
from tests.gpu.publish.rows import PublishedRow, build_s, calls_of, plan_lines, rows_left
from tests.gpu.publish.runs import MeasuredRow, MeasuredRun, append_rows, begin_run, kind_of, read_run
from tests.gpu.steps import Step

if TYPE_CHECKING:
    from tests.gpu.run import Result

    RunSteps = Callable[[Mapping[str, Step], Sequence[Gpu], Path], list[Result]]
_OVER_S = 40.0  # after a call's time the last row is stopped


def publish(given: argparse.Namespace, gpus: Sequence[Gpu], run_steps: RunSteps) -> int:
    """Do what the flags of `python -m tests.gpu.run --publish` ask for. Exit code 1 if a row of this call failed.

    Raises ConfigError where the folder has another commit or another kind of card.
    """
    folder: Path = given.publish
    if given.dry_run:
        run = read_run(folder) if folder.exists() else None
        done = {(row.name, row.gpus) for row in run.rows} if run else set()
        print(*plan_lines(given.gpus or len(gpus) or 2, done, call_s=given.budget_s), sep="\n")
        return 0
    run = begin_run(folder)
    if given.begin:
        print(f"{folder}: a run of commit {run.commit} has begun")
        return 0
    return measure(folder, run, gpus[: given.gpus or None], given.out, given.budget_s, run_steps)


def measure(
    folder: Path, run: MeasuredRun, gpus: Sequence[Gpu], out: Path, budget_s: float, run_steps: RunSteps, *,
    cores: int | None = None,
) -> int:  # fmt: skip
    """Measure what is left of a run, for at most so many seconds; 1 if a row failed."""
    begin_s, card = time.monotonic(), card_of(gpus, run)
    done = {(row.name, row.gpus) for row in run.rows}
    left = rows_left(len(gpus), done)
    calls = calls_of(left, cores or len(os.sched_getaffinity(0)), budget_s)
    if not calls:
        print(f"{folder}: all {len(done)} rows of {len(gpus)} GPUs are there")
        return 0
    _build(calls[0], gpus, out, budget_s, run_steps)
    file, failed = f"{datetime.now(UTC):%Y%m%dT%H%M%S}.jsonl", list[str]()
    for row in left:  # those of other calls, too, if there is time
        remaining_s = begin_s + budget_s - time.monotonic()
        if row.step.about_s + build_s([] if row in calls[0] else [row], 1) > remaining_s:
            continue
        step = replace(row.step, limit_s=min(row.step.limit_s, remaining_s + _OVER_S))
        (out / f"{row.name}.json").unlink(missing_ok=True)  # of the same row on another number of GPUs
        (result,) = run_steps({row.name: step}, gpus, out)
        found = _printed(row, out) if result.outcome == "ok" else None
        if found is None or (why := _refusal(found, card)):
            failed.append(f"{row.name} on {row.gpus} GPUs: {why if found is not None else result.outcome}")
            continue
        append_rows(folder, file, run, card, MeasuredRow(row.name, row.gpus, result.seconds, found))
        done.add(row.key)
    remaining = rows_left(len(gpus), done)
    told = f"\n{folder}: {len(done)} rows of commit {run.commit} on {card}, {len(remaining)} are left"
    print(told, *failed, sep="\n  failed: ")
    if remaining:
        print("call it again for: " + ", ".join(f"{row.name} ({row.gpus})" for row in remaining))
    return int(bool(failed))


def card_of(gpus: Sequence[Gpu], run: MeasuredRun) -> str:
    """The kind of all cards, which must be that of the run. Raises ConfigError."""
    cards = sorted({gpu.name for gpu in gpus})
    if len(cards) != 1:
        found = ", ".join(cards) or "none"
        raise ConfigError(f"a run has GPUs of one kind, and there are {found}; choose with CUDA_VISIBLE_DEVICES")
    if run.card and run.card != cards[0]:
        raise ConfigError(f"the folder {run.name} has rows of {run.card}, and here are {cards[0]}; give another folder")
    return cards[0]


def _build(rows: Sequence[PublishedRow], gpus: Sequence[Gpu], out: Path, limit_s: float, run_steps: RunSteps) -> None:
    groups = dict.fromkeys(group for row in rows for group in row.step.builds)
    command = (sys.executable, "-m", "tests.gpu.prebuild", *groups)
    run_steps({"prebuild": Step(0, 60, limit_s, command, "programs")}, gpus, out)


def _printed(row: PublishedRow, out: Path) -> Mapping[str, Any] | None:
    """The object that the benchmark printed; of the tests of lost ranks one with what each of them printed."""
    if row.name != "lost":
        path = out / f"{row.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    lines = (out / f"{row.name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    figures = [json.loads(line) for line in lines if line.startswith('{"gpus"')]
    return {"benchmark": "lost", "figures": figures} if figures else None


def _refusal(result: Mapping[str, Any], card: str) -> str:
    """Why a result does not count: it names another kind of card, or one of its figures failed."""
    gpu = str(result.get("configuration", {}).get("gpu", card))
    figures = result["figures"] if isinstance(result["figures"], list) else [result["figures"]]
    if kind_of(gpu) != kind_of(card):
        return f"it is of {gpu}"
    errors = [figure.get("error", figure.get("errors")) for figure in figures]
    return "; ".join(f"a part failed: {error}" for error in errors if error)
