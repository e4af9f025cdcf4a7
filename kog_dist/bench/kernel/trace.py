"""The time stamps of one traced token: what they say per phase, and the same as a Chrome trace, which Perfetto opens.

A product is a matrix-vector product of one phase, layer and lane, numbered as in the kernel's table
(`KernelShape.layer_products`); the LM head is the last one. For every product each thread block notes when its vector was there
(the slice of its first matrix warp, in shared memory), when the sums were, and when its rows were published; attention notes its
stages at those of qkv.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.bench.report import percentile
from kog_dist.model.spec import ReduceMode, Sublayer
from kog_dist.records import dataclass
from kog_dist.workers.cuda.kernel_abi import StampKind
from kog_dist.workers.cuda.kernel_shape import KernelShape

MIXERS = {"qkv": "attend", "delta_in": "delta"}  # who reads what they make, on attention's warps
_BEFORE = {"gate_up": "out", "qkv": "down", "delta_in": "down", "head": "down"}  # whose output they read: a residual stream
ATTENTION = ("query_seen", "scored", "mixed", "merged", "attended")  # stages of an item, in order; a delta net has no merging
Stamps = NDArray[np.float64]


@dataclass(frozen=True)
class Traced:
    """One matrix-vector product of the traced token; the LM head has the layer after the last one."""

    index: int
    phase: str
    layer: int
    lane: int


class Trace:
    """Stamps in us from the first one on; NaN where there is none.

    `raw`: what the kernel wrote, uint64 ns (thread blocks, kinds, products), 0 where it wrote nothing.
    """

    def __init__(self, raw: NDArray[np.uint64], shape: KernelShape) -> None:
        self.shape, self.num_ctas = shape, len(raw)
        stamped = raw > 0
        first = raw[stamped].min()
        self.stamps: Stamps = np.where(stamped, (raw - np.where(stamped, first, raw)) / 1000.0, np.nan)
        self.products = [
            Traced(index, product.op.name.lower(), product.layer, product.first_lane)
            for index, product in enumerate(shape.layer_products)
        ]
        self._index = {  # one of several lanes stands for each of them
            (made.op.name.lower(), made.layer, lane): index
            for index, made in enumerate(shape.layer_products)
            for lane in made.lanes
        }
        for _ in range(shape.head.num_products):
            self.products.append(Traced(len(self.products), "head", shape.spec.num_layers, shape.hosted_lanes[0]))

    def of(self, kind: str, product: int) -> Stamps:
        """Stamps (thread blocks,) of one kind."""
        return self.stamps[:, StampKind[kind.upper()], product]

    def last_published(self, product: Traced) -> float:
        """When the whole input of a product was published; NaN for the first ones, which read the embedding."""
        return max((self._last(kind, index) for kind, index in self._inputs(product)), default=float("nan"))

    def _last(self, kind: str, index: int) -> float:
        return float(np.nanmax(self.of(kind, index)))

    def _inputs(self, product: Traced) -> list[tuple[str, int]]:
        """Which stamps of which products say that the input is published."""
        phase, layer, lane = product.phase, product.layer, product.lane
        if phase == "out":
            return [("attended", next(self._index[made, layer, lane] for made in MIXERS if (made, layer, lane) in self._index))]
        if phase == "down":
            return [("published", self._index["gate_up", layer, lane])]
        sublayer = Sublayer.ATTENTION if phase == "gate_up" else Sublayer.MLP
        layer = layer if phase == "gate_up" else layer - 1
        if layer < 0:
            return []
        is_blocking = self.shape.spec.reduce_mode(layer, sublayer) is ReduceMode.BLOCKING
        lanes = self.shape.hosted_lanes
        # A blocking sum goes to all lanes' streams when the last lane has its partial.
        sources = lanes[-1:] if is_blocking else lanes if phase == "head" else (lane,)
        return [("published", self._index[_BEFORE[phase], layer, source]) for source in sources]

    # ---- what they say ----
    def durations(self) -> dict[str, dict[str, list[float]]]:
        """By phase and stage, the durations in us of all thread blocks, layers and lanes.

        hop: the whole input published -> vector there; multiply; publish; spread: from the first thread block that published to
        the last; step: the whole input published -> everything published. Attention: hop is q published -> q seen.
        Matrix warps gather a vector when they are done with the product before it: with several lanes a hop contains those of
        other lanes, and the vector has often been there for long.
        """
        found: dict[str, dict[str, list[float]]] = {}

        def add(phase: str, stage: str, values: Any) -> None:
            kept = np.atleast_1d(values)
            found.setdefault(phase, {}).setdefault(stage, []).extend(kept[np.isfinite(kept)].tolist())

        for product in self.products:
            fetched, multiplied, published = (self.of(kind, product.index) for kind in ("fetched", "multiplied", "published"))
            begin = self.last_published(product)
            add(product.phase, "hop", fetched - begin)
            add(product.phase, "multiply", multiplied - fetched)
            if np.isfinite(published).any():  # the LM head publishes candidates, which have no stamp
                add(product.phase, "publish", published - multiplied)
                add(product.phase, "spread", np.nanmax(published) - np.nanmin(published))
                add(product.phase, "step", np.nanmax(published) - begin)
            if product.phase in MIXERS and np.isfinite(self.of("attended", product.index)).any():
                begin, mixer = self._last("published", product.index), MIXERS[product.phase]
                stages = [self.of(kind, product.index) for kind in ATTENTION]
                add(mixer, "hop", stages[0] - begin)
                for name, early, late in zip(ATTENTION[1:], stages, stages[1:], strict=False):
                    add(mixer, name, late - early)
                add(mixer, "spread", np.nanmax(stages[-1]) - np.nanmin(stages[-1]))
                add(mixer, "step", np.nanmax(stages[-1]) - begin)
        return found

    def summary(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean, median and p99 in us, by phase and stage."""
        return {
            phase: {
                stage: {
                    "mean": round(float(np.mean(values)), 3),
                    "median": round(percentile(values, 0.5), 3),
                    "p99": round(percentile(values, 0.99), 3),
                }
                for stage, values in stages.items()
                if values
            }
            for phase, stages in self.durations().items()
        }

    def text(self) -> str:
        """The summary as a table: `mean (p99)` in us."""
        token_us = float(np.nanmax(self.stamps))
        lines = [f"{self.shape.num_lanes} lanes, token of {token_us:.1f} us; us, mean (p99) over thread blocks, layers and lanes"]
        for phase, stages in self.summary().items():
            cells = [f"{stage} {values['mean']:.2f} ({values['p99']:.2f})" for stage, values in stages.items()]
            lines.append(f"  {phase:8} {'  '.join(cells)}")
        return "\n".join(lines)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Chrome trace events: one process per thread block, one track per kind."""
        events = []
        for cta, kind, index in np.argwhere(np.isfinite(self.stamps)).tolist():
            product = self.products[index]
            label = "head" if product.phase == "head" else f"{product.phase} layer {product.layer} lane {product.lane}"
            event = {"name": f"{label} {StampKind(kind).name.lower()}", "ph": "X", "pid": cta, "tid": kind, "dur": 0.3}
            events.append({**event, "ts": round(float(self.stamps[cta, kind, index]), 3)})
        return events
