"""A picture of what a benchmark has measured, by matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kog_dist.bench.peers.rows import label_of
from kog_dist.bench.tables import Row, caption, rows_of

Draw = Callable[[Any, Sequence[Row]], None]  # into matplotlib's Axes


def draw(path: Path, whole: Mapping[str, Any]) -> None:
    """Write the picture of a result. Raises ValueError if it has nothing to be drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _PICTURES[whole["benchmark"]](axes, rows_of(whole))
    if not axes.has_data():
        raise ValueError("there are no figures to be drawn")
    axes.grid(alpha=0.3)
    figure.suptitle(caption(whole), fontsize=8, wrap=True)
    figure.savefig(path, dpi=150)


def _decode(axes: Any, rows: Sequence[Row]) -> None:
    """Tokens per second by ranks: the median as a bar, each request as a dot."""
    for place, row in enumerate(rows):
        axes.bar(place, row["tokens_per_s"], color="C0", alpha=0.6)
        runs = row["tokens_per_s_runs"]
        axes.plot([place] * len(runs), runs, "k.", markersize=4)
    axes.set_xticks(range(len(rows)), [str(row["ranks"]) for row in rows])
    axes.set(xlabel="ranks", ylabel="tokens/s")


def _latency(axes: object, rows: Sequence[Row]) -> None:
    """Microseconds per token by context: each number of lanes beside its ceiling, and compiled torch."""
    own = [row for row in rows if "ceiling_us" in row]
    for place, lanes in enumerate(dict.fromkeys(row["lanes"] for row in own)):
        chosen = [row for row in own if row["lanes"] == lanes]
        _line(axes, chosen, "context", "us_per_token", f"{lanes} lanes", color=f"C{place}")
        _line(axes, chosen, "context", "ceiling_us", f"{lanes} lanes, reading the weights alone", color=f"C{place}", fmt="--")
    torch = [row for row in rows if "baseline" in row and "us_per_token" in row]
    for form in dict.fromkeys(row["form"] for row in torch):
        _line(axes, [row for row in torch if row["form"] == form], "context", "us_per_token", f"torch, {form}", color="0.4")
    _by_numbers(axes, "context", "us per token")


def _scaling(axes: Any, rows: Sequence[Row]) -> None:
    """Tokens per second by GPUs, measured for each context or predicted, beside what is proportional to the fewest GPUs."""
    measured = [row for row in rows if "us_per_token" in row and "context" in row and "sampling" not in row]
    for place, context in enumerate(dict.fromkeys(row["context"] for row in measured)):
        chosen = sorted((row for row in measured if row["context"] == context), key=lambda row: int(row["gpus"]))
        _line(axes, chosen, "gpus", "tokens_per_s", f"context {context}", color=f"C{place}")
        first = chosen[0]
        ideal = [{"gpus": row["gpus"], "tokens_per_s": first["tokens_per_s"] * row["gpus"] / first["gpus"]} for row in chosen]
        _line(axes, ideal, "gpus", "tokens_per_s", None, color=f"C{place}", fmt=":")
    predicted = [row for row in rows if "predicted_us" in row]
    labels = {"measured_us": "measured", "predicted_us": "predicted from one GPU", "from_two_us": "predicted from two"}
    for name, label in labels.items():
        chosen = [{"gpus": row["gpus"], "tokens_per_s": 1e6 / row[name]} for row in predicted if row.get(name)]
        _line(axes, chosen, "gpus", "tokens_per_s", label, fmt="o" if name == "measured_us" else ".--")
    _by_numbers(axes, "GPUs", "tokens/s")


def _compare(axes: Any, rows: Sequence[Row]) -> None:
    """Ratios with their intervals, one below the other; at 1 there is no difference."""
    for place, row in enumerate(rows):
        low, high = (row["ratio"] if row[name] is None else row[name] for name in ("low", "high"))
        color = {"slower": "C3", "faster": "C2"}.get(row["verdict"], "0.4")
        spread = [[max(row["ratio"] - low, 0.0)], [max(high - row["ratio"], 0.0)]]
        axes.errorbar([row["ratio"]], [place], xerr=spread, fmt="o", capsize=4, color=color)
    axes.axvline(1.0, color="k", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['name']}\n{row['verdict']}" for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("B / A, with 95 % intervals")


def _peers(axes: Any, rows: Sequence[Row]) -> None:
    """Tokens per second of engines, a group of bars for each load."""
    measured = [row for row in rows if row["tokens_per_s"]]
    loads = list(dict.fromkeys(row["load"] for row in measured))
    places = [place + loads.index(row["load"]) for place, row in enumerate(measured)]
    colors = ["C0" if row["engine"] == "kog_dist" else "0.6" for row in measured]
    bars = axes.barh(places, [row["tokens_per_s"] for row in measured], color=colors, alpha=0.7)
    for bar, row in zip(bars, measured, strict=True):
        bar.set_hatch("" if row["drafts"] == "none" else "//")
    labels = [f"{row['load']}: {label_of(row['engine'], row['drafts'])}" for row in measured]
    axes.set_yticks(places, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("tokens/s of one request")


_PICTURES: Final[Mapping[str, Draw]] = {
    "decode": _decode,
    "latency": _latency,
    "scaling": _scaling,
    "compare": _compare,
    "peers": _peers,
}


def _line(axes: Any, rows: Sequence[Row], x: str, y: str, label: str | None, *, fmt: str = "o-", **style: Any) -> None:
    if rows:
        ascending = sorted(rows, key=lambda row: float(row[x]))
        axes.plot([row[x] for row in ascending], [row[y] for row in ascending], fmt, label=label, **style)


def _by_numbers(axes: Any, x_label: str, y_label: str) -> None:
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
