"""Loads with several numbers of requests at a time, one behind the other: `kog-bench serve --max-concurrency 1,2,4,8`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.report import print_json
from kog_dist.bench.service.figures import without_details
from kog_dist.bench.service.prompts import Prompt
from kog_dist.bench.service.report import page
from kog_dist.bench.service.serve import ServeSettings, check_folders, measured, table_of, table_of_each
from kog_dist.bench.service.svg_plots import curve
from kog_dist.rpc.output import write_out

_COLUMNS: Final = {  # by heading: a figure of a run, and its digits
    "at once": ("max_concurrency", 0),
    "tokens/s of one": ("median_decode_tokens_per_s", 1),
    "of all": ("output_throughput", 1),
    "first ms": ("median_ttft_ms", 1),
    "gap ms": ("median_itl_ms", 2),
    "p99": ("p99_itl_ms", 2),
    "failed": ("failed", 0),
}


def run(
    loads: Iterable[tuple[ServeSettings, Sequence[Prompt]]], output: Path | None, html: Path | None, *, each: bool = False
) -> int:
    """Measure each load, print its table, one of them all, and a JSON object; returns how many requests failed.

    Each load has its own prompts: what the server kept of one is no help for the next. The JSON object has `runs`, each as
    `serve.run` prints it. Raises what that raises.
    """
    check_folders(output, html)
    runs = list[dict[str, Any]]()
    for settings, prompts in loads:
        result, answers = measured(settings, prompts)
        runs.append(result)
        write_out(f"{settings.max_concurrency} at once\n")
        if each:
            write_out(table_of_each(answers) + "\n")
        write_out(table_of(result) + "\n\n")
    if output is not None:
        output.write_text(json.dumps({"benchmark": "serve", "runs": runs}) + "\n", encoding="utf-8")
    if html is not None:
        html.write_text(_html(runs), encoding="utf-8")
    write_out(_table(runs) + "\n")
    print_json({"benchmark": "serve", "runs": list(map(without_details, runs))})
    return sum(result["failed"] for result in runs)


def _cells(result: Mapping[str, object]) -> list[str]:
    """A run's figures as text; what a run without answers does not have is a dash."""
    values = ((result[name], digits) for name, digits in _COLUMNS.values())
    return ["-" if value is None else f"{value:.{digits}f}" for value, digits in values]


def _table(runs: Sequence[Mapping[str, object]]) -> str:
    widths = [max(9, len(heading) + 2) for heading in _COLUMNS]
    rows = [list(_COLUMNS), *map(_cells, runs)]
    return "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)


def _html(runs: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in _COLUMNS)
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _cells(result))}</tr>" for result in runs)
    plots = "".join(
        f"<h2>{title}</h2>{curve(_points(runs, name), 'requests at once', 'tokens/s')}"
        for title, name in (("Tokens/s of one request", "median_decode_tokens_per_s"), ("Of all together", "output_throughput"))
    )
    short = list(map(without_details, runs))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    title = f"{runs[0]['model_id']} at {runs[0]['configuration']['url']}"
    return page(title, f"{table}{plots}<h2>All figures</h2><pre>{escape(json.dumps(short, indent=1))}</pre>")


def _points(runs: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return sorted((result["max_concurrency"], result[name]) for result in runs if result[name] is not None)
