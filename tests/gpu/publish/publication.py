"""Which run a table is made of, and how cells look. All figures of a table are of one run: one commit and one kind of card."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.publish.figures import FiguresOf
from tests.gpu.publish.rows import NUMBERS
from tests.gpu.publish.runs import RESULTS, RUNS, MeasuredRun, read_runs

KINDS = ("H200", "H100")
WORDS = {1: "one", 2: "two", 4: "four"}
_COLUMNS = 120


@dataclass(frozen=True)
class Publication:
    """All that pages are made of. `runs`: the newest first."""

    runs: Sequence[MeasuredRun]
    peers: Mapping[str, Any]
    targets: Mapping[str, Any]

    @classmethod
    def read(cls, runs: Path = RUNS) -> Publication:
        peers, targets = (tomllib.loads((RESULTS / f"{name}.toml").read_text(encoding="utf-8")) for name in ("peers", "targets"))
        return cls(read_runs(runs), peers, targets)

    def target(self, name: str, *keys: object) -> float | None:
        """Of targets.toml; None where nothing is wanted."""
        found: Any = self.targets[name]
        for key in keys:
            found = found.get(str(key)) if isinstance(found, Mapping) else None
        return None if found is None else float(found)

    def newest(self, has: Callable[[FiguresOf], object], kind: str = "H200") -> FiguresOf | None:
        """The newest run of these cards that has something."""
        return next((of for run in self.runs if run.kind == kind and has(of := FiguresOf(run))), None)

    def by_numbers(self, has: Callable[[FiguresOf, int], object], kind: str = "H200") -> list[tuple[FiguresOf, list[int]]]:
        """The newest run of one GPU with all numbers of GPUs that it has, then the newest of each number that it lacks."""
        found, covered = list[tuple[FiguresOf, list[int]]](), set[int]()
        for number in NUMBERS:
            of = None if number in covered else self.newest(partial(_has, has, number), kind)
            if of is None:
                continue
            numbers = [n for n in NUMBERS if n not in covered and has(of, n)]
            found.append((of, numbers))
            covered |= set(numbers)
        return found

    def since(self, of: FiguresOf) -> list[FiguresOf]:
        """Newer runs on the same kind of card, the newest first."""
        return [FiguresOf(run) for run in self.runs if run.kind == of.run.kind and run.date > of.run.date]


def _has(has: Callable[[FiguresOf, int], object], number: int, of: FiguresOf) -> object:
    return has(of, number)


# ---- Markdown ----
def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: Iterable[int] = (0,)) -> list[str]:
    """Lines of a table; columns are numbers but for these."""
    texts = set(text_columns)
    rule = "|".join("---" if number in texts else "---:" for number in range(len(head)))
    return [_line(head), f"|{rule}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def prose(text: str) -> list[str]:
    """Lines of a paragraph."""
    return textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, digits: int = 0) -> str:
    """Rounded to nearest; halves upwards, as people do."""
    if value is None:
        return ""
    rounded = Decimal(str(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
    return f"{abs(rounded) if rounded == 0 else rounded:,f}"


def at_most(value: float | None, limit: float | None, digits: int = 0) -> str:
    """A figure, in bold if it is more than wanted."""
    shown = number(value, digits)
    return f"**{shown}**" if value is not None and limit is not None and value > limit else shown


def at_least(value: float | None, limit: float | None, digits: int = 0) -> str:
    """A figure, in bold if it is less than wanted."""
    shown = number(value, digits)
    return f"**{shown}**" if value is not None and limit is not None and value < limit else shown


def verdict(value: float | None, limit: float | None, *, least: bool = False) -> str:
    """Whether a target was met, or by how many percent it was missed; nothing where there is none."""
    if value is None or limit is None:
        return ""
    percent = 100 * (limit / value - 1 if least else value / limit - 1)
    return "met" if percent <= 0 else f"**missed** by {percent:.{1 if percent >= 0.1 else 2}f} %"


def verdicts(found: Iterable[str]) -> str:
    """Several of them, one for each number of GPUs; one word where all are met."""
    said = [one for one in found if one]
    return "met" if said and set(said) == {"met"} else "; ".join(said)


def joined(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def cards(kind: str, numbers: Sequence[int]) -> str:
    """`one and two H200s`."""
    return f"{joined([WORDS[n] for n in numbers])} {kind}{'' if list(numbers) == [1] else 's'}"


def caption(of: FiguresOf, numbers: Sequence[int], more: str = "") -> list[str]:
    """Where a table comes from, in front of it, on a page of docs."""
    run, where = of.run, cards(of.run.kind, numbers)
    whole = f"{where[0].upper()}{where[1:]}, commit {run.commit}, {run.date[:10]} ([raw](results/runs/{run.name})).{more}"
    return [*prose(whole), ""]


def missing(names: Sequence[str]) -> list[str]:
    """What a table lacks, behind it."""
    return ["", *prose(f"Not measured at this commit: {'; '.join(names)}.")] if names else []
