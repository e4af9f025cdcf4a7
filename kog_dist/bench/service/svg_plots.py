"""Plots as inline SVG, without scripts or anything that is loaded. Colours are CSS classes of the page around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from kog_dist.records import dataclass

WIDTH, HEIGHT = 640, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 40
_NUM_BARS: Final = 48


@dataclass(frozen=True, slots=True)
class _Axis:
    """Values to positions along one side of the plot."""

    low: float
    high: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        span = self.high - self.low or 1.0
        return self.begin + (value - self.low) / span * (self.end - self.begin)

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values."""
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        rough = span / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def histogram(values: Sequence[float], unit: str, marks: Sequence[tuple[str, float]] = ()) -> str:
    """How often values occur, up to their 99.5th percentile; `marks` are named lines. The rest is counted in the last bar."""
    if not values:
        return _empty("no values")
    ascending = sorted(values)
    low, high = ascending[0], ascending[min(len(ascending) - 1, math.ceil(0.995 * len(ascending)))]
    high = max([high, *(value for _, value in marks if value <= ascending[-1])])
    width = (high - low) / _NUM_BARS or 1.0
    counts = [0] * _NUM_BARS
    for value in ascending:
        counts[min(_NUM_BARS - 1, int((value - low) / width))] += 1
    x_axis = _Axis(low, low + width * _NUM_BARS, _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(0, max(counts), HEIGHT - _BOTTOM, _TOP)
    parts = []
    for idx, count in enumerate(counts):
        if count:
            x0, x1, y = x_axis.at(low + idx * width), x_axis.at(low + (idx + 1) * width), y_axis.at(count)
            title = f"{low + idx * width:.4g} to {low + (idx + 1) * width:.4g} {unit}: {count}"
            parts.append(_rect(x0, y, max(0.5, x1 - x0 - 0.5), HEIGHT - _BOTTOM - y, "bar", title))
    for number, (name, value) in enumerate(marks):
        if low <= value <= x_axis.high:
            x = x_axis.at(value)
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/>')
            side, anchor = (3, "start") if x < WIDTH * 0.75 else (-3, "end")
            parts.append(_text(x + side, _TOP + 10 + 12 * number, f"{name} {_rounded(value)}", anchor))
    return _svg(parts, x_axis, y_axis, unit, f"distribution of {len(values)} values in {unit}")


def curve(points: Sequence[tuple[float, float]], x_unit: str, y_unit: str) -> str:
    """A line through points that ascend in x."""
    if len(points) < 2:
        return _empty("too short to draw")
    x_axis = _Axis(points[0][0], points[-1][0], _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(0, max(y for _, y in points) or 1.0, HEIGHT - _BOTTOM, _TOP)
    path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
    return _svg([f'<polyline class="line" points="{path}"/>'], x_axis, y_axis, x_unit, f"{y_unit} over {x_unit}", y_unit)


def lines(series: Mapping[str, Sequence[tuple[float, float]]], x_unit: str, y_unit: str) -> str:
    """Several named lines through points that ascend in x; the y axis fits them. Classes `line series-0`, `line series-1`, ..."""
    points = [point for line in series.values() for point in line]
    if len(points) < 2:
        return _empty("too short to draw")
    x_axis = _Axis(min(x for x, _ in points), max(x for x, _ in points), _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(min(y for _, y in points), max(y for _, y in points), HEIGHT - _BOTTOM, _TOP)
    parts = []
    for number, (name, line) in enumerate(series.items()):
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in line)
        parts.append(f'<polyline class="line series-{number}" points="{path}"/>')
        parts.append(_legend(number, name))
    return _svg(parts, x_axis, y_axis, x_unit, f"{y_unit} over {x_unit}", y_unit)


def intervals(rows: Sequence[tuple[str, int, float, float, float]], unit: str, *, with_zero: bool = False) -> str:
    """Values with intervals, one row each: (label, series, value, low, high). Classes `interval` and `dot`, with `series-N`."""
    if not rows:
        return _empty("nothing to draw")
    left, row = 230, 16.0
    height = round(_TOP + row * len(rows) + _BOTTOM)
    zero = [0.0] if with_zero else []
    low_end, high_end = min([*zero, *(low for *_, low, _ in rows)]), max([*zero, *(high for *_, high in rows)])
    x_axis = _Axis(low_end, high_end, left, WIDTH - _RIGHT)
    parts = []
    if x_axis.low <= 0 <= x_axis.high:
        parts.append(f'<line class="mark" x1="{x_axis.at(0):.1f}" x2="{x_axis.at(0):.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
    for idx, (label, series, value, low, high) in enumerate(rows):
        y = _TOP + (idx + 0.5) * row
        title = f"<title>{escape(f'{label}: {value:.4g} ({low:.4g} to {high:.4g}) {unit}')}</title>"
        parts.append(_text(left - 8, y + 4, label, "end"))
        parts.append(
            f'<line class="interval series-{series}" x1="{x_axis.at(low):.1f}" x2="{x_axis.at(high):.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}">{title}</line>'
        )
        parts.append(f'<circle class="dot series-{series}" cx="{x_axis.at(value):.1f}" cy="{y:.1f}" r="3.5">{title}</circle>')
    return _svg(parts, x_axis, None, unit, f"{len(rows)} values with intervals in {unit}", "", height)


def timeline(spans: Sequence[tuple[float, float, float, str]]) -> str:
    """Requests as bars: (start, first token, end) in seconds and a title; the time to the first token is paler."""
    if not spans:
        return _empty("no request was answered")
    row = max(1.5, min(14.0, 320 / len(spans)))
    height = round(_TOP + row * len(spans) + _BOTTOM)
    x_axis = _Axis(0.0, max(end for _, _, end, _ in spans), _LEFT, WIDTH - _RIGHT)
    parts = []
    for idx, (start, first, end, title) in enumerate(spans):
        y, bar = _TOP + idx * row, max(1.0, row - 1)
        parts.append(_rect(x_axis.at(start), y, max(0.5, x_axis.at(first) - x_axis.at(start)), bar, "pale", title))
        parts.append(_rect(x_axis.at(first), y, max(0.5, x_axis.at(end) - x_axis.at(first)), bar, "bar", title))
    return _svg(parts, x_axis, None, "s", f"timeline of {len(spans)} requests", "requests", height)


def _rounded(value: float) -> str:
    """Three digits or more, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _svg(
    parts: Sequence[str], x_axis: _Axis, y_axis: _Axis | None, x_unit: str, label: str, y_unit: str = "", height: int = HEIGHT
) -> str:
    base = height - _BOTTOM
    drawn = [f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>']
    for value in x_axis.ticks(6):
        drawn.append(_text(x_axis.at(value), base + 16, f"{value:.4g}"))
    drawn.append(_text(WIDTH - _RIGHT, base + 32, x_unit, "end"))
    for value in y_axis.ticks(4) if y_axis is not None else ():
        y = y_axis.at(value) if y_axis is not None else 0.0
        drawn.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        drawn.append(_text(_LEFT - 6, y + 4, f"{value:.4g}", "end"))
    if y_unit:
        drawn.append(_text(_LEFT, base + 32, y_unit, "start"))
    body = "".join([*drawn, *parts])
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}">{body}</svg>'


def _legend(number: int, name: str) -> str:
    y = _TOP + 10 + 14 * number
    swatch = f'<line class="line series-{number}" x1="{WIDTH - 150}" x2="{WIDTH - 130}" y1="{y - 4}" y2="{y - 4}"/>'
    return swatch + _text(WIDTH - 124, y, name, "start")


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}><title>{escape(title)}</title></rect>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _empty(why: str) -> str:
    return f"<p>{escape(why)}</p>"
