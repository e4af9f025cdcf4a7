"""Keys and values stand where phases/attend_cache.cuh looks for them."""

from __future__ import annotations

import numpy as np
import pytest

from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.model.cache_layout import CacheLayout
from tests.unit.prefill.models import SMALL, SPLITS, layout_of

SPEC = ModelSpec(**{**SMALL, "hidden_size": 256})  # a head_dim that the kernel runs
LAYOUT = layout_of(SPEC, 4)


def place_in_bytes(layer: int, lane: int, kv_head: int, position: int, dim: int, part: int) -> int:
    """`CacheReader::rows_of` of attend_cache.cuh in Python, by its own names. `part`: 0 K, 1 V."""
    head_dim, splits, lanes, items = SPEC.head_dim, LAYOUT.splits, 4, SPEC.lane_kv_heads * LAYOUT.splits
    item = kv_head * splits + position % splits
    windowed = layer in SPEC.window_layers
    batches = LAYOUT.window_batches if windowed else LAYOUT.full_batches
    windowed_before = sum(1 for other in SPEC.window_layers if other < layer)
    first_batch = (windowed_before * LAYOUT.window_batches + (layer - windowed_before) * LAYOUT.full_batches) * lanes * items
    first_batch += (lane * items + item) * batches
    slot = (position // splits) % (batches * 16)
    at = (first_batch + (slot >> 4)) * 2 * 16 * head_dim * 2
    row = slot & 15
    if part == 0:
        return at + row * head_dim * 2 + dim * 2
    return at + 16 * head_dim * 2 + (row >> 1) * head_dim * 4 + dim * 4 + (row & 1) * 2


@pytest.mark.parametrize("layer", range(SPEC.num_layers))
def test_every_value_is_where_the_kernel_reads_it(layer: int) -> None:
    cache = np.zeros(LAYOUT.num_values, np.uint16)
    count, shape = 200, (200, LAYOUT.heads, SPEC.head_dim)
    random = np.random.default_rng(layer)
    keys, values = (random.integers(1, 2**15, shape).astype(np.uint16) for _ in range(2))
    LAYOUT.store(cache, layer, 0, keys, values)
    first = LAYOUT.first_kept(layer, count)
    assert first == (count - 128 if layer in SPEC.window_layers else 0)
    for _ in range(300):
        lane, kv_head, dim = (int(random.integers(n)) for n in (4, SPEC.lane_kv_heads, SPEC.head_dim))
        position = int(random.integers(first, count))
        for part, wanted in enumerate((keys, values)):
            found = cache[place_in_bytes(layer, lane, kv_head, position, dim, part) // 2]
            assert found == wanted[position, lane * SPEC.lane_kv_heads + kv_head, dim]
    loaded = LAYOUT.load(cache, layer, first, count)
    assert np.array_equal(loaded[0], keys[first:])
    assert np.array_equal(loaded[1], values[first:])


def test_sizes_are_those_of_the_kernel() -> None:
    for spec in (SPEC, ModelSpec(**{**SMALL, "hidden_size": 256, "sliding_window": None, "window_layers": ()})):
        shape = KernelShape(spec, range(2, 4), splits=SPLITS)
        layout = CacheLayout.of(shape)
        assert 2 * layout.num_values == shape.kv_bytes
        assert layout == layout_of(spec, 2)
