"""What came out of an ablation: losses with confidence intervals, differences to delay 0, a table and pictures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kog_dist.bench.service.svg_plots import intervals
from kog_dist.records import dataclass
from kog_dist.train.ablation_grid import REFERENCE
from kog_dist.train.curves import standalone
from kog_dist.train.intervals import Mean, mean_of, paired
from kog_dist.train.state import write_json
from kog_dist.train.tokens import bits_per_byte


@dataclass(frozen=True)
class Row:
    """One form at one number of lanes: losses in nats per token, means over seeds."""

    lanes: int
    form: str
    learning_rate_factor: float
    loss: Mean
    bits_per_byte: Mean
    difference: Mean | None  # to delay 0 of the same lanes, learning rate and seeds
    tokens_per_s: float  # median over seeds: the first run of a form also compiled it

    @property
    def label(self) -> str:
        """For tables and pictures."""
        rate = "" if self.learning_rate_factor == 1 else f", rate x {self.learning_rate_factor:g}"
        return f"{self.lanes} lanes, {self.form}{rate}"


def rows_of(results: Sequence[dict[str, Any]], bytes_per_token: float) -> list[Row]:
    """Results of `Ablation.results` by lanes, learning rate and form."""
    losses: dict[tuple[int, float, str], dict[int, float]] = defaultdict(dict)
    rates: dict[tuple[int, float, str], list[float]] = defaultdict(list)
    for result in results:
        place = result["lanes"], result["learning_rate_factor"], result["form"]
        losses[place][result["seed"]] = result["loss"]
        rates[place].append(result["tokens"] / result["seconds"])
    rows = []
    for (lanes, factor, form), by_seed in losses.items():
        reference = losses.get((lanes, factor, REFERENCE), {})
        values = list(by_seed.values())
        rows.append(
            Row(
                lanes=lanes,
                form=form,
                learning_rate_factor=factor,
                loss=mean_of(values),
                bits_per_byte=mean_of([bits_per_byte(loss, bytes_per_token) for loss in values]),
                difference=None if form == REFERENCE else paired(by_seed, reference),
                tokens_per_s=sorted(rates[lanes, factor, form])[len(values) // 2],
            )
        )
    return sorted(rows, key=lambda row: (-row.lanes, row.learning_rate_factor))  # stable: forms stay in the grid's order


def over_lanes(results: Sequence[dict[str, Any]]) -> dict[tuple[float, str], Mean]:
    """By learning rate and form: the mean difference to delay 0 over all lanes and seeds that have both."""
    found: dict[tuple[float, str], list[float]] = {}
    losses = {(r["learning_rate_factor"], r["form"], r["lanes"], r["seed"]): r["loss"] for r in results}
    for (factor, form, lanes, seed), loss in losses.items():
        reference = losses.get((factor, REFERENCE, lanes, seed))
        if form != REFERENCE and reference is not None:
            found.setdefault((factor, form), []).append(loss - reference)
    return {key: mean_of(values) for key, values in found.items()}


def write_report(out: Path, config: dict[str, Any], results: Sequence[dict[str, object]], bytes_per_token: float) -> list[Row]:
    """Write `results.json`, `table.md`, `loss.svg` and `difference.svg` of what is done so far."""
    rows = rows_of(results, bytes_per_token)
    content = {"config": config, "held_out_bytes_per_token": bytes_per_token, "rows": list(map(asdict, rows)), "runs": results}
    write_json(out / "results.json", content)
    (out / "table.md").write_text(table(rows) + "\n" + table_over_lanes(over_lanes(results)), encoding="utf-8")
    series = {lanes: number for number, lanes in enumerate(dict.fromkeys(row.lanes for row in rows))}
    for name, unit in (("loss", "nats per token"), ("difference", "nats per token more than with delay 0")):
        means = [(row, row.loss if name == "loss" else row.difference) for row in rows]
        drawn = [
            (row.label, series[row.lanes], mean.value, mean.value - (mean.half or 0), mean.value + (mean.half or 0))
            for row, mean in means
            if mean is not None
        ]
        if drawn:
            (out / f"{name}.svg").write_text(standalone(intervals(drawn, unit, with_zero=name == "difference")), encoding="utf-8")
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| lanes | form | seeds | held-out loss | bits per byte | difference to delay 0 | M tokens/s |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        rate = "" if row.learning_rate_factor == 1 else f" (rate x {row.learning_rate_factor:g})"
        difference = "" if row.difference is None else row.difference.text("+.4f")
        lines.append(
            f"| {row.lanes} | {row.form}{rate} | {row.loss.count} | {row.loss.text('.4f')} | "
            f"{row.bits_per_byte.text('.4f')} | {difference} | {row.tokens_per_s / 1e6:.2f} |"
        )
    return "\n".join(lines) + "\n"


def table_over_lanes(means: dict[tuple[float, str], Mean]) -> str:
    """What `over_lanes` gives, as Markdown."""
    lines = ["| form | runs | difference to delay 0, all lanes |", "|---|---:|---:|"]
    for (factor, form), mean in means.items():
        rate = "" if factor == 1 else f" (rate x {factor:g})"
        lines.append(f"| {form}{rate} | {mean.count} | {mean.text('+.4f')} |")
    return "\n".join(lines) + "\n"
