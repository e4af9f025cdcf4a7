"""What a traced token says: durations between the right stamps, inputs of the right products, a picture and a Chrome trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.trace import Trace
from kog_dist.bench.trace_picture import bars_of, draw
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import STAMP_KINDS

SPEC = ModelSpec(128, 3, 8, 8, 256, 100, max_context=64, num_lanes=4, delay=1)
SHAPE = KernelShape(SPEC, range(4), max_ctas=4)
BLOCKS = SHAPE.num_ctas


def made_up(shape: KernelShape = SHAPE) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Product i of thread block c: vector there at 100 i + c, multiplied 30 later, published at 40, attention at 60 to 100."""
    lanes, layers = shape.num_lanes, shape.spec.num_layers
    raw = np.zeros((shape.num_ctas, len(STAMP_KINDS), 4 * lanes * layers + 1), np.uint64)
    at = 1_000_000 + 100 * np.arange(raw.shape[2], dtype=np.uint64)[None] + np.arange(shape.num_ctas, dtype=np.uint64)[:, None]
    for kind, later in (("fetched", 0), ("multiplied", 30), ("published", 40)):
        raw[:, STAMP_KINDS.index(kind)] = at + np.uint64(later)
    raw[:, STAMP_KINDS.index("published"), -1] = 0
    queries = [4 * lanes * layer + lane for layer in range(layers) for lane in range(lanes)]
    for number, kind in enumerate(("query_seen", "scored", "mixed", "merged", "attended")):
        raw[:2, STAMP_KINDS.index(kind), queries] = at[:2, queries] + np.uint64(60 + 10 * number)  # two blocks have items
    return raw * np.uint64(10)


def test_inputs_are_those_of_the_model() -> None:
    trace = Trace(made_up(), SHAPE)
    last = 0.01 * (BLOCKS - 1)

    def when(layer: int, phase: int, lane: int) -> float:
        return next(trace.last_published(p) for p in trace.products if p.index == (4 * layer + phase) * 4 + lane)

    assert np.isnan(when(0, 0, 1)), "the embedding"
    assert when(0, 1, 2) == pytest.approx(2 * 1.0 + 1.0 + 0.01), "attention of the same lane, the later of the two blocks"
    assert when(0, 2, 1) == pytest.approx(7 * 1.0 + 0.4 + last), "layer 0 sums blocking: lane 3 of out"
    assert when(1, 0, 1) == pytest.approx(15 * 1.0 + 0.4 + last), "the same of down"
    assert when(1, 2, 1) == pytest.approx((16 + 5) * 1.0 + 0.4 + last), "delayed: the same lane of out"
    assert when(2, 0, 1) == pytest.approx((16 + 13) * 1.0 + 0.4 + last)
    assert when(1, 3, 2) == pytest.approx((16 + 10) * 1.0 + 0.4 + last)
    assert trace.last_published(trace.products[-1]) == pytest.approx(47 * 1.0 + 0.4 + last), "the head waits for all lanes"


def test_summary() -> None:
    trace = Trace(made_up(), SHAPE)
    summary = trace.summary()
    assert list(summary) == ["qkv", "attend", "out", "gate_up", "down", "head"]
    assert summary["down"]["multiply"] == {"mean": 0.3, "median": 0.3, "p99": 0.3}
    assert summary["down"]["publish"]["mean"] == 0.1
    assert summary["down"]["spread"]["mean"] == pytest.approx(0.01 * (BLOCKS - 1))
    assert summary["down"]["hop"]["p99"] == pytest.approx(3.6)  # of the last block: 4 products later, less publishing
    assert summary["down"]["step"]["mean"] == pytest.approx(4.0)
    assert summary["attend"]["scored"]["mean"] == 0.1
    assert summary["attend"]["hop"]["mean"] == pytest.approx(0.2 + 0.005 - 0.01 * (BLOCKS - 1))
    assert "publish" not in summary["head"]
    text = trace.text()
    assert "  down     hop " in text
    assert "multiply 0.30 (0.30)" in text


def test_chrome_events_have_every_stamp() -> None:
    raw = made_up()
    events = Trace(raw, SHAPE).chrome_events()
    assert len(events) == np.count_nonzero(raw)
    first = {"name": "qkv layer 0 lane 0 fetched", "ph": "X", "pid": 0, "tid": 0, "dur": 0.3, "ts": 0.0}
    assert first in events
    assert {event["name"] for event in events} >= {
        "down layer 2 lane 3 published",
        "head multiplied",
        "qkv layer 1 lane 2 attended",
    }


def test_bars_and_picture(tmp_path: Path) -> None:
    trace = Trace(made_up(), SHAPE)
    bars = bars_of(trace, 1)
    assert bars["multiply", "head"][0] == pytest.approx((48.01, 0.3))
    assert len(bars["attend", "attend"]) == 12
    assert ("attend", "attend") not in bars_of(trace, 3)
    assert len(bars["wait", "qkv"]) == 8
    pytest.importorskip("matplotlib")
    draw(trace, tmp_path / "token.png")
    assert (tmp_path / "token.png").read_bytes().startswith(b"\x89PNG")
    one = KernelShape(replace(SPEC, num_layers=1), range(1), max_ctas=4)
    draw(Trace(made_up(one), one), tmp_path / "one.png")
