"""Keys and values stand where phases/attend_cache.cuh looks for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from tests.unit.prefill.models import SMALL, SPLITS, layout_of
from tests.unit.test_kinds_twin import SPECS

SPEC = ModelSpec(**{**SMALL, "hidden_size": 256})  # a head_dim that the kernel runs
LAYOUT, WHOLE = (layout_of(SPEC, 4, whole_windows=is_whole) for is_whole in (False, True))
LAYOUTS = {
    f"{'whole windows' if is_whole else 'rings'}, {splits} splits": layout_of(SPEC, 4, whole_windows=is_whole, splits=splits)
    for splits in (SPLITS, 15)
    for is_whole in (False, True)
}


def place_in_bytes(layout: CacheLayout, layer: int, lane: int, kv_head: int, position: int, dim: int, part: int) -> int:
    """`CacheReader::rows_of` of attend_cache.cuh in Python, by its own names. `part`: 0 K, 1 V."""
    head_dim, splits, lanes, items = SPEC.head_dim, layout.splits, 4, SPEC.lane_kv_heads * layout.splits
    item = kv_head * splits + position % splits
    windowed = layer in SPEC.window_layers
    batches = layout.window_batches if windowed else layout.full_batches
    kept = layout.full_batches if layout.whole_windows else layout.window_batches
    windowed_before = sum(1 for other in SPEC.window_layers if other < layer)
    first_batch = (windowed_before * kept + (layer - windowed_before) * layout.full_batches) * lanes * items
    first_batch += (lane * items + item) * (kept if windowed else layout.full_batches)
    slot, turn = (position // splits) % (batches * 16), (position // splits) // (batches * 16)
    first_batch += turn * batches if layout.whole_windows else 0
    at = (first_batch + (slot >> 4)) * 2 * 16 * head_dim * 2
    row = slot & 15
    if part == 0:
        return at + row * head_dim * 2 + dim * 2
    return at + 16 * head_dim * 2 + (row >> 1) * head_dim * 4 + dim * 4 + (row & 1) * 2


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("layer", range(SPEC.num_layers))
def test_every_value_is_where_the_kernel_reads_it(layer: int, layout: CacheLayout) -> None:
    cache = np.zeros(layout.num_values, np.uint16)
    count, ring = 250, 16 * layout.splits
    shape = (count, layout.heads, SPEC.head_dim)
    random = np.random.default_rng(layer)
    keys, values = (random.integers(1, 2**15, shape).astype(np.uint16) for _ in range(2))
    layout.store(cache, layer, 0, keys, values)
    first = layout.first_kept(layer, count)
    assert first == (count - ring if layer in SPEC.window_layers and not layout.whole_windows else 0)
    assert layout.first_read(layer, count) == (count - ring if layer in SPEC.window_layers else 0)
    for _ in range(300):
        lane, kv_head, dim = (int(random.integers(n)) for n in (4, SPEC.lane_kv_heads, SPEC.head_dim))
        position = int(random.integers(first, count))
        for part, wanted in enumerate((keys, values)):
            found = cache[place_in_bytes(layout, layer, lane, kv_head, position, dim, part) // 2]
            assert found == wanted[position, lane * SPEC.lane_kv_heads + kv_head, dim]
    loaded = layout.load(cache, layer, first, count)
    assert np.array_equal(loaded[0], keys[first:])
    assert np.array_equal(loaded[1], values[first:])


def test_lanes_that_share_a_head_keep_it_once() -> None:
    """Of four lanes and two heads; a rank of one lane has a head of its own."""
    spec = replace(SPECS["gated attention"], max_context=256)
    layout, alone = layout_of(spec, 4), layout_of(spec, 1)
    assert (layout.sharing_lanes, layout.kv_heads, layout.heads) == (2, 2, 4)
    assert (alone.sharing_lanes, alone.kv_heads, 2 * alone.num_bytes) == (1, 1, layout.num_bytes)
    rows = np.arange(2 * 9 * 2 * 256, dtype=np.uint16).reshape(2, 9, 2, 256)
    cache = np.zeros(layout.num_values, np.uint16)
    layout.store(cache, 1, 3, *(part.repeat(2, 1) for part in rows))
    assert not cache[: layout.num_values // 2].any(), "another layer"
    assert np.array_equal(layout.load(cache, 1, 3, 12), rows.repeat(2, 2))
    own = np.zeros(alone.num_values, np.uint16)
    alone.store(own, 1, 3, *(part[:, 1:] for part in rows))
    assert np.array_equal(layout.batches_of(cache, 1)[1], alone.batches_of(own, 1)[0])


def test_sizes_are_those_of_the_kernel() -> None:
    for spec in (SPEC, ModelSpec(**{**SMALL, "hidden_size": 256, "sliding_window": None, "window_layers": ()})):
        for whole_windows in (False, True):
            shape = KernelShape(spec, range(2, 4), splits=SPLITS, whole_windows=whole_windows)
            layout = CacheLayout.of(shape)
            assert 2 * layout.num_values == shape.cache.num_bytes == layout.num_bytes
            assert layout == layout_of(spec, 2, whole_windows=whole_windows)
            assert shape.cache.ring_positions == (128 if layout.has_rings else 0)
            assert layout.has_rings == (bool(spec.window_layers) and not whole_windows)
    assert WHOLE.num_values == SPEC.num_layers * WHOLE.first_batches[1] * WHOLE.batch_values, "layers are alike"
