"""Folders of raw results. A run is a folder of docs/results/runs, of one commit and one kind of card.

    run.json            {"commit": "64c4420f", "date": "2026-11-26T22:50", "sources": SHA-256 of what was measured}
    20261126T225017.jsonl, ...   a line for each row: {"row", "gpus", "commit", "card", "seconds", "result"}

One call of `python -m tests.gpu.run --publish` writes one file of rows; `result` is the JSON object that ends a benchmark.
Runs from before there were such folders are `transcribed`: their rows repeat logs of docs/results, or name a file there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kog_dist.bench.report import DIRTY, commit
from kog_dist.errors import ConfigError

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
RUNS = RESULTS / "runs"
_ABOUT = "run.json"
_SOURCES = ("kog_dist", "collectives", "launch", "workers", "tests/gpu")  # what runs, and how it is measured
_SUFFIXES = {".py", ".c", ".cu", ".cuh", ".h"}


@dataclass(frozen=True)
class MeasuredRow:
    """What one benchmark printed. `gpus`: how many it had; its figures may be of fewer, too."""

    name: str
    gpus: int
    seconds: float
    result: Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredRun:
    """All rows of a folder. `card` is empty as long as there are none."""

    name: str
    commit: str
    date: str
    card: str
    rows: tuple[MeasuredRow, ...] = ()
    note: str = ""
    again: tuple[str, ...] = ()  # rows that were measured more than once; the first counts

    @property
    def kind(self) -> str:
        """H200 of `NVIDIA H200`, H100 of `NVIDIA H100 80GB HBM3`."""
        return kind_of(self.card)

    def results(self, name: str) -> list[MeasuredRow]:
        """Rows of a name, those of most GPUs first."""
        return sorted((row for row in self.rows if row.name == name), key=lambda row: -row.gpus)


def kind_of(card: str) -> str:
    return next((word for word in card.split() if word[:1] in "AHB" and word[1:].isdigit()), card)


def sources_digest(root: Path = ROOT) -> str:
    """SHA-256 of names and contents of all sources. It tells whether a copy without its history is the tree of a commit."""
    paths = {
        path.relative_to(root).as_posix(): path
        for folder in _SOURCES
        for path in (root / folder).rglob("*")
        if path.suffix in _SUFFIXES and path.is_file() and not _is_linked(path, root)
    }
    whole = hashlib.sha256()
    for name, path in sorted(paths.items()):
        whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _is_linked(path: Path, root: Path) -> bool:
    """Whether a folder between the root and it is a link: what lies there has another name, too."""
    return any((root / parent).is_symlink() for parent in path.relative_to(root).parents[:-1])


def begin_run(folder: Path) -> MeasuredRun:
    """The run of this folder and this tree, begun if there is none.

    A folder that knows its commit needs no git. Raises ConfigError where the tree is another one, or in no commit.
    """
    digest = sources_digest()
    if not (folder / _ABOUT).exists():
        if (source := commit()).endswith(DIRTY) or not _is_commit(source):
            raise ConfigError(
                f"{folder} cannot begin: this tree is {source}, and figures are published of a commit alone. Commit what has "
                f"changed (git status); where there is no git, begin the folder where there is, with --begin, and bring it along"
            )
        folder.mkdir(parents=True, exist_ok=True)
        about = {"commit": source, "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M}", "sources": digest}
        (folder / _ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    if about.get("sources") != digest:
        raise ConfigError(
            f"{folder} is a run of commit {about['commit']}, whose sources are not those of this tree ({commit()}): check that "
            f"commit out, or give another folder"
        )
    return read_run(folder)


def append_rows(folder: Path, name: str, run: MeasuredRun, card: str, row: MeasuredRow) -> None:
    """Add a row to a file of rows of the folder, which the next call finds there."""
    line = {
        "row": row.name, "gpus": row.gpus, "commit": run.commit, "card": card, "seconds": row.seconds, "result": row.result,
    }  # fmt: skip
    with (folder / name).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_run(folder: Path) -> MeasuredRun:
    """Raises ConfigError naming the file and the row where commits or cards differ."""
    if not (folder / _ABOUT).is_file():
        raise ConfigError(f"{folder} is no run: it has no {_ABOUT}")
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    if about["commit"].endswith(DIRTY):
        raise ConfigError(f"{folder / _ABOUT}: {about['commit']} is no commit")
    rows, again, card = dict[tuple[str, int], MeasuredRow](), list[str](), ""
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            line = json.loads(text)
            where = f"{path}:{number}: row {line['row']} on {line['gpus']} GPUs"
            card = card or str(line["card"])
            if line["commit"] != about["commit"]:
                raise ConfigError(f"{where} is of commit {line['commit']}, the folder of {about['commit']}; a run has one commit")
            if line["card"] != card:
                raise ConfigError(f"{where} is of {line['card']}, those before of {card}; a run has one kind of card")
            key = (str(line["row"]), int(line["gpus"]))
            if key in rows:
                again.append(where)
            else:
                rows[key] = MeasuredRow(*key, float(line.get("seconds", 0)), _result(line, about, where))
    name, note = folder.name, str(about.get("note", ""))
    return MeasuredRun(name, about["commit"], about["date"], card, tuple(rows.values()), note, tuple(again))


def read_runs(folder: Path = RUNS) -> list[MeasuredRun]:
    """All runs, the newest first."""
    runs = [read_run(path) for path in _folders(folder)]
    return sorted(runs, key=lambda run: (run.date, run.name), reverse=True)


def _folders(folder: Path) -> Iterable[Path]:
    return (path for path in sorted(folder.iterdir()) if path.is_dir())


def _result(line: Mapping[str, Any], about: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if "result" in line:
        result: Mapping[str, Any] = line["result"]
        return result
    if not about.get("transcribed"):
        raise ConfigError(f"{where} has no result")
    named: Mapping[str, Any] = json.loads((RESULTS / line["file"]).read_text(encoding="utf-8"))
    return named


def _is_commit(text: str) -> bool:
    return len(text) >= 7 and all(character in "0123456789abcdef" for character in text)
