"""The report of `kog-bench serve` as one HTML file that loads nothing: table, distributions, timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kog_dist.bench.service.figures import METRICS, notes_of, without_details
from kog_dist.bench.service.svg_plots import curve, histogram, timeline

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --bar: #2864c7; --pale: #b9cdf0; --grid: #dde2e8;
  --mark: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --paper: #14171c; --bar: #7aa7f7; --pale: #33486f; --grid: #2c323b; --mark: #ff8f85 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { padding: .2rem .8rem; text-align: right;
  border-bottom: 1px solid var(--grid) } th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; max-width: 44rem } svg text { font-size: 11px; fill: var(--ink) }
.bar { fill: var(--bar) } .pale { fill: var(--pale) } .axis { stroke: var(--ink) } .grid { stroke: var(--grid) }
.mark { stroke: var(--mark); stroke-dasharray: 4 3 } .line { fill: none; stroke: var(--bar); stroke-width: 1.5 }
pre { overflow-x: auto; font-size: 12px } .bad { color: var(--mark) }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_COLUMNS = ("mean", "median", "p90", "p99", "std")


def report_html(result: Mapping[str, Any]) -> str:
    """The whole page. `result` is what `kog-bench serve --output` writes."""
    title = f"{result['model_id']} at {result['configuration']['url']}"
    failed = f', <span class="bad">{result["failed"]} failed</span>' if result["failed"] else ""
    summary = (
        f"{result['completed']} requests answered{failed} in {result['duration']:.2f} s: "
        f"{result['output_throughput']:.1f} output tokens/s, {result['request_throughput']:.2f} requests/s"
    )
    notes = "".join(f"<li>{escape(note.removeprefix('note: '))}</li>" for note in notes_of(dict(result)))
    errors = "".join(f'<li class="bad">{escape(error)}</li>' for error in sorted({e for e in result["errors"] if e})[:20])
    return page(
        title,
        f"""<p>{summary}</p>
{_table(result)}
<ul>{notes}{errors}</ul>
{_plots(result)}
<h2>All figures</h2>
<pre>{escape(json.dumps(without_details(result), indent=1))}</pre>""",
    )


def page(title: str, body: str) -> str:
    """One HTML file that loads nothing. `title` is text, `body` is HTML."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def _table(result: Mapping[str, object]) -> str:
    head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    rows = []
    for name, meaning in METRICS.items():
        cells = "".join(f"<td>{result[f'{column}_{name}_ms']:.3f}</td>" for column in _COLUMNS)
        rows.append(f"<tr><td>{name}: {meaning}</td>{cells}</tr>")
    return f"<table><thead><tr><th>ms</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _plots(result: Mapping[str, Any]) -> str:
    good = [idx for idx, error in enumerate(result["errors"]) if not error]
    ttfts_ms = [result["ttfts"][idx] * 1e3 for idx in good]
    itls_ms = [gap_s * 1e3 for idx in good for gap_s in result["itls"][idx]]
    plots = [
        ("Time to first token", histogram(ttfts_ms, "ms", _marks(result, "ttft"))),
        ("Gap between chunks", histogram(itls_ms, "ms", _marks(result, "itl"))),
        ("Requests", timeline([_span(result, idx) for idx in good[:400]])),
        ("Output tokens in each tenth of a second", curve(_rates(result, good), "s", "tokens/s")),
    ]
    return "".join(f"<h2>{name}</h2>{drawn}" for name, drawn in plots)


def _marks(result: Mapping[str, Any], name: str) -> Sequence[tuple[str, float]]:
    return [("median", result[f"median_{name}_ms"]), ("p99", result[f"p99_{name}_ms"])]


def _span(result: Mapping[str, Any], idx: int) -> tuple[float, float, float, str]:
    start_s, ttft_s, latency_s = result["start_times"][idx], result["ttfts"][idx], result["latencies"][idx]
    title = f"request {idx}: first token {ttft_s * 1e3:.1f} ms, end {latency_s * 1e3:.1f} ms, {result['output_lens'][idx]} tokens"
    return start_s, start_s + ttft_s, start_s + latency_s, title


def _rates(result: Mapping[str, Any], good: Sequence[int]) -> list[tuple[float, float]]:
    """Tokens per second in each tenth of a second; a chunk has its share of its answer's tokens."""
    bins: dict[int, float] = {}
    for idx in good:
        share = result["output_lens"][idx] / len(result["stamps"][idx])
        for stamp_s in result["stamps"][idx]:
            number = int((result["start_times"][idx] + stamp_s) * 10)
            bins[number] = bins.get(number, 0.0) + share
    return [(number / 10, bins.get(number, 0.0) * 10) for number in range(max(bins, default=0) + 1)]
