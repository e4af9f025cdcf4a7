"""What a traced token says: durations between the right stamps, inputs of the right products, a picture and a Chrome trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.kernel.trace import Trace
from kog_dist.bench.kernel.trace_picture import bars_of, draw
from kog_dist.decode.plan.steps import Phase
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_abi import StampKind
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.test_kinds_twin import SPECS

SPEC = ModelSpec(128, 3, 8, 8, 256, 100, max_context=64, num_lanes=4, delay=1)
SHAPE = KernelShape(SPEC, range(4), max_ctas=4)  # layer 0 sums blocking; then lanes 2 and 3 are half a layer behind 0 and 1
BLOCKS = SHAPE.num_ctas
QKV, OUT, GATE_UP, DOWN = Phase.QKV, Phase.OUT, Phase.GATE_UP, Phase.DOWN


def made_up(shape: KernelShape = SHAPE) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Product i of thread block c: vector there at 100 i + c, multiplied 30 later, published at 40, attention at 60 to 100."""
    raw = np.zeros((shape.num_ctas, len(StampKind), len(shape.layer_products) + 1), np.uint64)
    at = 1_000_000 + 100 * np.arange(raw.shape[2], dtype=np.uint64)[None] + np.arange(shape.num_ctas, dtype=np.uint64)[:, None]
    for kind, later in (("fetched", 0), ("multiplied", 30), ("published", 40)):
        raw[:, StampKind[kind.upper()]] = at + np.uint64(later)
    raw[:, StampKind.PUBLISHED, -1] = 0
    queries = [index for index, product in enumerate(shape.layer_products) if product.op in (QKV, Phase.DELTA_IN)]
    for number, kind in enumerate(("query_seen", "scored", "mixed", "merged", "attended")):
        raw[:2, StampKind[kind.upper()], queries] = at[:2, queries] + np.uint64(60 + 10 * number)  # two blocks have items
    return raw * np.uint64(10)


@pytest.mark.parametrize("shape", [SHAPE, KernelShape(SPEC, range(3, 4), max_ctas=4)], ids=["staggered", "plain"])
def test_inputs_are_those_of_the_model(shape: KernelShape) -> None:
    trace = Trace(made_up(shape), shape)
    last_block = 0.01 * (BLOCKS - 1)

    def number(layer: int, phase: Phase, lane: int) -> int:
        found = [(product.layer, product.op, product.first_lane) for product in shape.layer_products]
        return found.index((layer, phase, lane))

    def when(layer: int, phase: Phase, lane: int) -> float:
        return trace.last_published(trace.products[number(layer, phase, lane)])

    def published(layer: int, phase: Phase, lane: int) -> object:
        return pytest.approx(number(layer, phase, lane) * 1.0 + 0.4 + last_block)

    assert np.isnan(when(0, QKV, 3)), "the embedding"
    for layer in range(3):
        for lane in shape.hosted_lanes:
            attended = pytest.approx(number(layer, QKV, lane) * 1.0 + 1.0 + 0.01)  # of the later of the two blocks
            assert when(layer, OUT, lane) == attended
            assert when(layer, DOWN, lane) == published(layer, GATE_UP, lane)
    for lane in shape.hosted_lanes:
        assert when(0, GATE_UP, lane) == published(0, OUT, 3), "layer 0 sums blocking: the last lane of out"
        assert when(1, QKV, lane) == published(0, DOWN, 3), "the same of down"
        assert when(1, GATE_UP, lane) == published(1, OUT, lane), "delayed: the same lane of out"
        assert when(2, QKV, lane) == published(1, DOWN, lane)
    assert trace.last_published(trace.products[-1]) == published(2, DOWN, 3), "the head waits for all lanes"


def test_output_of_a_delta_net_is_the_input_of_out() -> None:
    shape = KernelShape(SPECS["delta nets"], range(4), max_ctas=4)
    trace = Trace(made_up(shape), shape)
    first = {product.phase: product for product in trace.products if product.layer == 1}
    assert trace.last_published(first["out"]) == pytest.approx(first["delta_in"].index + 1.0 + 0.01)
    before = max(product.index for product in trace.products if product.phase == "down" and product.layer == 0)
    assert trace.last_published(first["delta_in"]) == pytest.approx(before + 0.4 + 0.01 * (shape.num_ctas - 1))
    summary = trace.summary()
    assert summary["delta"]["step"]["mean"] == pytest.approx(0.6 + 0.01 - 0.01 * (shape.num_ctas - 1))
    assert {("attend", "delta"), ("multiply", "delta_in")} <= set(bars_of(trace, 0))


def test_summary() -> None:
    trace = Trace(made_up(), SHAPE)
    summary = trace.summary()
    assert list(summary) == ["qkv", "attend", "out", "gate_up", "down", "head"]
    assert summary["down"]["multiply"] == {"mean": 0.3, "median": 0.3, "p99": 0.3}
    assert summary["down"]["publish"]["mean"] == 0.1
    assert summary["down"]["spread"]["mean"] == pytest.approx(0.01 * (BLOCKS - 1))
    # A lane's DOWN is four products behind its GATE_UP in layer 0, 2 3 3 3 in layer 1, 5 4 2 2 in layer 2.
    assert summary["down"]["hop"]["p99"] == pytest.approx(4.6)  # of the last block, less publishing
    assert summary["down"]["step"]["mean"] == pytest.approx((4 * 4.0 + 11.0 + 13.0) / 12, abs=1e-3)
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
    before, after = (
        next(event["ts"] for event in events if event["name"] == f"{product} multiplied")
        for product in ("gate_up layer 1 lane 2", "qkv layer 2 lane 1")
    )
    assert after - before == pytest.approx(1.0), "neighbours in the order of the kernel"


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
