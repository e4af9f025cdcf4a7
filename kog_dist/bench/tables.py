"""The figures of a benchmark as a table: in Markdown for people, as comma-separated values for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def rows_of(whole: Mapping[str, object]) -> list[Row]:
    """What a table has a row for each of."""
    found = whole.get("figures", whole.get("ratios"))
    return [row for row in (found if isinstance(found, list) else [found]) if isinstance(row, Mapping)]


def caption(whole: Mapping[str, Any]) -> str:
    """`kog-bench latency, commit 0123456789ab, NVIDIA H200, model demo, tokens 200`: what the figures are of."""
    configuration = dict(whole.get("configuration", {}))
    machine = configuration.pop("gpu", whole.get("machine", {}).get("cpu"))
    plain = {name: value for name, value in configuration.items() if isinstance(value, str | int | float)}
    settings = [f"{name.replace('_', ' ')} {value}" for name, value in plain.items()]
    parts = [f"commit {whole['commit']}" if "commit" in whole else None, machine, *settings]
    return ", ".join([f"kog-bench {whole['benchmark']}", *map(str, filter(None, parts))])


def markdown(whole: Mapping[str, object]) -> str:
    """A table with the caption above it; numbers are rounded."""
    columns, rows = _columns(whole), rows_of(whole)
    if not columns:
        return f"{caption(whole)}: no figures\n"
    numbers = [all(_is_number(row.get(name)) for row in rows) for name in columns]
    lines = [[name.replace("_", " ") for name in columns], ["---:" if is_number else "---" for is_number in numbers]]
    lines += [[_shown(row.get(name)) for name in columns] for row in rows]
    return f"{caption(whole)}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def comma_separated(whole: Mapping[str, object]) -> str:
    """A table with a line of names, for programs; numbers as they were measured."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(whole), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows_of(whole))
    return text.getvalue()


def _columns(whole: Mapping[str, object]) -> list[str]:
    """Names of what has one value in a row, in the order in which they come."""
    names = dict.fromkeys(name for row in rows_of(whole) for name in row)
    return [name for name in names if not any(isinstance(row.get(name), list | tuple | Mapping) for row in rows_of(whole))]


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|").replace("\n", " ")
