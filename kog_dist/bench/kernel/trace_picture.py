"""One traced token as a picture: what a few thread blocks did when, coloured by phase."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kog_dist.bench.kernel.trace import ATTENTION, MIXERS, Trace

COLOURS = {
    "qkv": "#4c72b0", "delta_in": "#64b5cd", "attend": "#dd8452", "delta": "#ccb974", "out": "#55a868", "gate_up": "#c44e52",
    "down": "#8172b3", "head": "#937860",
}  # fmt: skip
ROWS = ("wait", "multiply", "publish", "attend")
Bars = dict[tuple[str, str], list[tuple[float, float]]]  # by row and phase: (start, width) in us


def bars_of(trace: Trace, cta: int) -> Bars:
    """What one thread block did: waiting for a vector that is published already, multiplying, publishing, attending."""
    bars: Bars = {}

    def add(row: str, phase: str, start: float, stop: float) -> None:
        if np.isfinite(start) and np.isfinite(stop) and stop > start:
            bars.setdefault((row, phase), []).append((float(start), float(stop - start)))

    for product in trace.products:
        fetched, multiplied, published = (
            float(trace.of(kind, product.index)[cta]) for kind in ("fetched", "multiplied", "published")
        )
        add("wait", product.phase, trace.last_published(product), fetched)
        add("multiply", product.phase, fetched, multiplied)
        add("publish", product.phase, multiplied, published)
        if product.phase in MIXERS:
            seen, attended = (float(trace.of(kind, product.index)[cta]) for kind in (ATTENTION[0], ATTENTION[-1]))
            add("attend", MIXERS[product.phase], seen, attended)
    return bars


def draw(trace: Trace, path: Path) -> None:
    """Write the picture: the whole token above, two layers in its middle below. Thread blocks: first, middle, last."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ctas = sorted({0, trace.num_ctas // 2, trace.num_ctas - 1})
    figure = Figure(figsize=(18, 2 + 2.2 * len(ctas)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (first, last) in zip(
        figure.subplots(2, 1), ((0.0, float(np.nanmax(trace.stamps))), _two_layers(trace)), strict=True
    ):
        _draw_rows(axes, trace, ctas)
        axes.set_xlim(first, last)
    figure.axes[1].set_xlabel("us")
    made = {product.phase for product in trace.products}
    made |= {mixer for phase, mixer in MIXERS.items() if phase in made}
    handles = [Patch(color=colour, label=phase) for phase, colour in COLOURS.items() if phase in made]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    figure.suptitle(f"One token, {trace.shape.num_lanes} hosted lanes: {np.nanmax(trace.stamps):.1f} us", x=0.01, ha="left")
    figure.savefig(path, dpi=110)


def _draw_rows(axes: Any, trace: Trace, ctas: list[int]) -> None:
    labels = [f"block {cta}: {row}" for cta in ctas for row in ROWS]
    for place, cta in enumerate(ctas):
        for (row, phase), spans in bars_of(trace, cta).items():
            axes.broken_barh(spans, (place * len(ROWS) + ROWS.index(row) - 0.4, 0.8), facecolors=COLOURS[phase])
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()


def _two_layers(trace: Trace) -> tuple[float, float]:
    """From the last publication of the layer before the middle two to that of their second one."""
    middle = trace.shape.spec.num_layers // 2

    def end_of(layer: int) -> float:
        stamps = trace.stamps[:, :, [product.index for product in trace.products if product.layer == layer]]
        return float(np.nanmax(stamps)) if stamps.size else 0.0

    begin, end = end_of(middle - 2), end_of(middle)
    return begin, max(end, begin + 1.0)
