"""The definition's attention against sums in a loop, and what the experts of a chunk take of memory."""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import MOE
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.prefill.base.reference import attend
from kog_dist.workers.prefill.buffers.experts import expert_row_bytes, expert_rows

HEAD_DIM = 4


def spec_of(num_lanes: int, num_heads: int, num_kv_heads: int) -> ModelSpec:
    return ModelSpec(
        hidden_size=8 * num_lanes, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=8 * num_lanes,
        vocab_size=16, max_context=32, num_lanes=num_lanes, delay=0, own_head_dim=HEAD_DIM,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize(("num_lanes", "num_heads", "num_kv_heads"), [(2, 8, 4), (1, 6, 2), (2, 4, 4)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_a_mean_of_what_each_token_sees(
    window: int | None, start: int, num_lanes: int, num_heads: int, num_kv_heads: int, with_sinks: bool
) -> None:
    spec, size = spec_of(num_lanes, num_heads, num_kv_heads), 4
    chance = np.random.default_rng(1)
    query = chance.standard_normal((size, num_heads, spec.head_dim))
    keys, values = chance.standard_normal((2, start + size + 3, num_kv_heads, spec.head_dim))
    sinks = chance.standard_normal(num_heads).astype(np.float32) if with_sinks else None
    found = attend(spec, query, keys, values, start, window, sinks)
    per_lane = num_heads // num_lanes
    assert found.shape == (num_lanes, size, per_lane * spec.head_dim)
    for row in range(size):
        position = start + row
        seen = range(0 if window is None else max(0, position - window + 1), position + 1)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            weights = [math.exp(query[row, head] @ keys[other, kv_head] / math.sqrt(spec.head_dim)) for other in seen]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            wanted = sum(weight * values[other, kv_head] for weight, other in zip(weights, seen, strict=True)) / total
            lane, of_lane = divmod(head, per_lane)
            place = slice(of_lane * spec.head_dim, (of_lane + 1) * spec.head_dim)
            np.testing.assert_allclose(found[lane, row, place], wanted, rtol=1e-9)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize("num_lanes", [1, 4])
def test_experts_of_a_token_take_as_much_memory_as_was_said(name: str, num_lanes: int) -> None:
    spec, size, taken = read_config(MOE[name]), 8, dict[str, int]()

    def view(what: str, *shape: int, dtype: Any) -> Any:
        taken[what] = prod(shape) * np.dtype(dtype).itemsize
        return np.empty(shape, dtype)

    rows = expert_rows(spec, num_lanes, size, np.dtype(np.uint16), view)
    assert rows is not None
    assert spec.experts is not None
    pairs, d = size * spec.experts.per_token, spec.hidden_size
    assert rows.operands.shape == (pairs, d)
    assert rows.result.shape == (pairs, num_lanes, d)
    assert rows.activation.shape[:2] == (pairs, num_lanes)
    assert rows.activation.shape[2] % 32 == 0
    assert rows.activation.shape[2] >= spec.lane_ffn
    assert rows.planes.shape == (2, size, d)
    assert rows.offsets.shape == (spec.experts.num_experts + 1,)
    x_itself = 2 * d * size
    assert sum(taken.values()) - x_itself == size * expert_row_bytes(spec, num_lanes)
    assert expert_rows(spec_of(2, 4, 4), 2, 8, np.dtype(np.uint16), view) is None
    assert expert_row_bytes(spec_of(2, 4, 4), 2) == 0
