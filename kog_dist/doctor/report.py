"""What a check finds, and how all findings are shown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import groupby
from typing import Any

from kog_dist import __version__
from kog_dist.quoting import json_text
from kog_dist.records import dataclass

_WIDTH = 8
_COLUMNS = 110


class Level(StrEnum):
    """PROBLEM: it stops an engine from starting here. WARNING: it stops some engines, or costs speed or safety."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence: what is there; unless the level is OK, also the cause and the remedy. `details` go to --json only."""

    level: Level
    text: str
    details: Mapping[str, object] = field(default_factory=dict)


def ok(text: str, **details: Any) -> Finding:
    """Nothing to do."""
    return Finding(Level.OK, text, details)


def warning(text: str, **details: object) -> Finding:
    """Something that somebody may want to change."""
    return Finding(Level.WARNING, text, details)


def problem(text: str, **details: object) -> Finding:
    """Something without whose mending no engine starts."""
    return Finding(Level.PROBLEM, text, details)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The findings of one check."""

    area: str
    name: str
    findings: Sequence[Finding]


def exit_code(answers: Iterable[CheckResult]) -> int:
    """0, or 1 when there is a problem."""
    return int(any(finding.level is Level.PROBLEM for answer in answers for finding in answer.findings))


def as_text(answers: Sequence[CheckResult]) -> str:
    """Findings by area, and a line that sums them up."""
    lines: list[str] = []
    for area, members in groupby(filter(lambda answer: answer.findings, answers), key=lambda answer: answer.area):
        lines.append(area)
        lines += [line for answer in members for finding in answer.findings for line in _wrapped(finding)]
    return "\n".join([*lines, _summary(answers)])


def _wrapped(finding: Finding) -> list[str]:
    """The lines of a finding; words, such as paths, are never broken."""
    first = f"  {finding.level:<{_WIDTH}}"
    return textwrap.wrap(
        finding.text,
        _COLUMNS,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def as_json(answers: Sequence[CheckResult]) -> str:
    """One object: version, verdict, findings."""
    found = [
        {"area": answer.area, "check": answer.name, "level": finding.level.value, "text": finding.text, **_nested(finding)}
        for answer in answers
        for finding in answer.findings
    ]
    return json_text({"version": __version__, "ok": exit_code(answers) == 0, "findings": found})


def _nested(finding: Finding) -> dict[str, object]:
    return {"details": dict(finding.details)} if finding.details else {}


def _summary(answers: Sequence[CheckResult]) -> str:
    levels = [finding.level for answer in answers for finding in answer.findings]
    counts = ", ".join(_counts(levels))
    if Level.PROBLEM in levels:
        return f"{counts}: no engine can start here until the problems are solved"
    return f"{counts}: an engine can start here"


def _counts(levels: Sequence[Level]) -> Iterator[str]:
    for level in (Level.PROBLEM, Level.WARNING):
        count = levels.count(level)
        yield f"{count or 'no'} {level.value}{'' if count == 1 else 's'}"
