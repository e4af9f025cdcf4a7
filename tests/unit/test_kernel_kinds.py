"""Shapes of the monokernel for models whose layers are stored one by one: sums over kinds of layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kog_dist.decode.plan.steps import Phase
from kog_dist.decode.plan.validate import validate
from kog_dist.errors import ConfigError
from kog_dist.model.layers import DeltaNet, Ffn
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kernel_words import word_findings
from tests.unit.delta_configs import CONFIGS

FLAT = ModelSpec(
    hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=128, vocab_size=76, max_context=64, num_lanes=4,
    delay=0, qk_norm=True, own_head_dim=32,
)  # fmt: skip


def stored(spec: ModelSpec, **others: Any) -> ModelSpec:
    """The same model, with its layers one by one."""
    fields = ("hidden_size", "vocab_size", "max_context", "num_lanes", "norm_eps")
    return ModelSpec.of_layers(spec.layers, **{name: getattr(spec, name) for name in fields} | others)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stored_layers_of_one_kind_are_the_same_build(num_ranks: int) -> None:
    of_flat, of_stored = (
        KernelShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, max_ctas=4) for spec in (FLAT, stored(FLAT))
    )
    assert shape_header(of_stored) == shape_header(of_flat)
    assert of_stored.cache.num_bytes == of_flat.cache.num_bytes
    assert of_stored.words.lists == of_flat.words.lists


PUBLISHED = ("Qwen3.5-27B", "Qwen3.5-9B", "Qwen3.5-4B", "Qwen3.5-2B", "Qwen3.5-0.8B")  # dense ones


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_of_published_delta_nets_are_sums_over_their_layers(name: str, num_ranks: int) -> None:
    """Their plan and their words are proved; what a rank keeps is counted by hand."""
    spec = read_config(CONFIGS[name]).with_context(4096)
    if spec.num_lanes < num_ranks:
        pytest.skip("one lane")
    shapes = [KernelShape(spec, spec.lanes_of_rank(rank, num_ranks), num_ranks=num_ranks) for rank in range(num_ranks)]
    assert validate(kernel_plan(shapes)) == []
    shape, text = shapes[0], CONFIGS[name]["text_config"]
    assert word_findings(shape) == ()
    layers, lanes = spec.num_layers, spec.num_lanes
    assert Counter(product.op for product in shape.layer_products) == {
        Phase.DELTA_IN: layers // 4 * 3 * shape.num_lanes // shape.lanes_of(Phase.DELTA_IN),
        Phase.QKV: layers // 4 * shape.num_lanes // shape.lanes_of(Phase.QKV),
        Phase.OUT: layers * shape.num_lanes,
        Phase.GATE_UP: layers * shape.num_lanes // shape.lanes_of(Phase.GATE_UP),
        Phase.DOWN: layers * shape.num_lanes,
    }
    kv_heads = max(text["num_key_value_heads"], lanes) // num_ranks
    assert shape.cache.layers == tuple(range(3, layers, 4))
    assert shape.cache.num_bytes == layers // 4 * kv_heads * 4096 * 2 * 256 * 2
    assert shape.delta is not None
    heads, items = text["linear_num_value_heads"] // num_ranks, shape.delta.items * shape.num_lanes
    assert items == heads * shape.delta.slices <= shape.num_ctas
    of_inputs = items * 4 * (256 + 128 // shape.delta.slices)  # each item has the last four of its channels
    assert shape.delta.num_bytes == 4 * layers // 4 * 3 * (heads * 128 * 128 + of_inputs)
    weights = sum(product.rows.num_rows * matrix_columns(spec, product.op) for product in shape.products)
    assert weights <= shape.num_ctas * shape.tape.num_values <= 1.06 * weights


def matrix_columns(spec: ModelSpec, op: Phase) -> int:
    """Those of a product's matrix."""
    of_lane = {Phase.OUT: spec.lane_heads * spec.head_dim, Phase.DOWN: spec.lane_ffn}
    return of_lane.get(op, spec.hidden_size)


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"key_dim": 48}, r"keys of 48 values in delta nets \(a multiple of 32\)"),
        ({"value_dim": 48}, r"value heads of 48 values in delta nets \(a power of two from 16 on\)"),
        ({"num_value_heads": 4}, r"delta nets whose lanes give 32 values, beside attention's 64 \(as many\)"),
    ],
)
def test_delta_nets_of_other_sizes_are_refused(change: dict[str, int], finding: str) -> None:
    layer = stored(FLAT).layers[0]
    net = replace(layer, mixer=replace(DeltaNet(4, 8, 32, 32, 4), **change))
    spec = ModelSpec.of_layers((net, layer), hidden_size=64, vocab_size=76, max_context=64, num_lanes=4)
    with pytest.raises(ConfigError, match=finding):
        KernelShape(spec, range(4), max_ctas=4)


def test_layers_that_no_device_code_has_are_refused() -> None:
    spec = stored(FLAT)
    layers = [*spec.layers[:2], replace(spec.layers[0], ffn=Ffn(256))]
    with pytest.raises(ConfigError, match=r"it has FFNs of several kinds \(1\); use --device cpu"):
        KernelShape(replace(spec, mixed_layers=tuple(layers)), range(4), max_ctas=4)
