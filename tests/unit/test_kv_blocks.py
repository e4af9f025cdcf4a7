"""The block pool of a GPU, with host memory in its place: blocks are the positions that they are said to be."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import named_shape, named_spec
from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.errors import ConfigError
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec, laneformer_2b
from kog_dist.workers.cuda import kv_blocks
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_blocks import KvBlocks, block_bytes, block_tokens, pool_slots
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from tests.unit.delta_configs import CONFIGS
from tests.unit.test_kinds_twin import SPECS

STREAM = 5
SPEC = ModelSpec(
    hidden_size=256, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=512, vocab_size=100, max_context=1400,
    num_lanes=2, delay=0,
)  # fmt: skip


def view(address: int, num_bytes: int) -> Any:
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def copy(to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
    assert (kind, stream) == (4, STREAM)
    view(to, num_bytes)[:] = view(source, num_bytes)


def copy_rows(to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: int) -> None:
    for row in range(height):
        copy(to + row * to_pitch, source + row * pitch, width, kind, stream)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def allocate(num_bytes: int) -> Any:
        held.append(np.full(num_bytes, 255, np.uint8))
        return SimpleNamespace(ptr=held[-1].ctypes.data)

    runtime = SimpleNamespace(memcpyAsync=copy, memcpy2DAsync=copy_rows)
    cuda = SimpleNamespace(Memory=allocate, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(kv_blocks, "HostMapping", lambda _address, _num_bytes: None)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("window_layers", [(), (0, 2)])
def test_positions_go_to_blocks_and_back(window_layers: tuple[int, ...]) -> None:
    spec = replace(SPEC, sliding_window=100 if window_layers else None, window_layers=window_layers)
    shape = KernelShape(spec, range(2), whole_windows=bool(window_layers))
    layout, tokens = CacheLayout.of(shape), block_tokens(shape)
    assert tokens == 16 * shape.splits
    cache = np.random.default_rng(1).integers(0, 9, layout.num_values).astype(np.uint16)
    before = cache.copy()
    blocks = KvBlocks(shape, cache.ctypes.data, 2, 1)
    block = 1
    copies = (KvCopy(KvCopyKind.SAVE, 0, block), KvCopy(KvCopyKind.SAVE, 1, 0), KvCopy(KvCopyKind.MOVE, 0, 2))
    blocks.copy(KvUse(copies=copies), STREAM)
    assert np.array_equal(cache, before), "saving changes nothing"
    cache.fill(0)
    blocks.copy(KvUse(copies=(KvCopy(KvCopyKind.LOAD, 2, block),)), STREAM)
    for layer in range(SPEC.num_layers):
        for first, wanted in ((0, None), (tokens, before), (2 * tokens, None)):
            end = min(first + tokens, SPEC.max_context)
            found = layout.load(cache, layer, first, end)
            kept = layout.load(before if wanted is not None else np.zeros_like(cache), layer, first, end)
            for part, other in zip(found, kept, strict=True):
                assert np.array_equal(part, other), f"layer {layer}, positions {first} to {end}"
    blocks.copy(KvUse(copies=(KvCopy(KvCopyKind.LOAD, 1, 0),)), STREAM)
    assert np.array_equal(layout.load(cache, 2, 0, tokens)[0], layout.load(before, 2, 0, tokens)[0])


@pytest.mark.usefixtures("memory")
def test_positions_and_states_of_delta_nets_go_to_slots_and_back() -> None:
    """Blocks are of the layers that keep positions alone; a state goes whole, with the KV cache that it belongs to."""
    shape = KernelShape(replace(SPECS["delta nets"], max_context=600), range(4))
    assert shape.delta is not None
    num_blocks, rng = -(-600 // block_tokens(shape)), np.random.default_rng(2)
    assert block_bytes(shape) * num_blocks == shape.cache.num_bytes, "one layer of four"
    batches = 2, 4 * shape.splits, num_blocks, shape.cache.batch_bytes  # caches, splits of KV heads, one of each block
    caches = rng.integers(0, 9, batches).astype(np.uint8)
    nets = rng.integers(0, 9, (2, shape.delta.num_bytes)).astype(np.uint8)
    before = caches.copy(), nets.copy()
    blocks = KvBlocks(shape, caches.ctypes.data, 1, 0, nets_ptr=nets.ctypes.data, states=3, host_states=2)
    saves = KvCopy(KvCopyKind.SAVE_STATE, 2, 7), KvCopy(KvCopyKind.SAVE, 0, 1), KvCopy(KvCopyKind.SAVE_STATE, 1, 9)
    blocks.copy(KvUse(cache=1, copies=saves[:2]), STREAM)
    nets[1].fill(77)
    blocks.copy(KvUse(cache=1, copies=saves[2:]), STREAM)
    assert np.array_equal(caches, before[0])
    blocks.copy(KvUse(copies=(KvCopy(KvCopyKind.MOVE_STATE, 2, 4), KvCopy(KvCopyKind.MOVE_STATE, 1, 2))), STREAM)  # to the host
    nets.fill(255)
    caches.fill(0)
    blocks.copy(KvUse(cache=0, copies=(KvCopy(KvCopyKind.LOAD, 0, 1), KvCopy(KvCopyKind.LOAD_STATE, 4, 7))), STREAM)
    assert np.array_equal(nets[0], before[1][1])
    assert (nets[1] == 255).all()
    assert np.array_equal(caches[0, :, 1], before[0][1, :, 1])
    assert caches.any(axis=(1, 3)).tolist() == [[number == 1 for number in range(num_blocks)], [False] * num_blocks]
    blocks.copy(KvUse(cache=0, copies=(KvCopy(KvCopyKind.LOAD_STATE, 2, 9),)), STREAM)
    assert (nets[0] == 77).all()


def test_a_pool_has_copies_of_states_before_it_has_blocks() -> None:
    spec = read_config(CONFIGS["Qwen3.5-27B"]).with_context(9216)
    shape = KernelShape(spec, range(8))
    assert shape.delta is not None
    of_token = 65_536  # of four KV heads, each of which two lanes have
    assert (block_tokens(shape), block_bytes(shape)) == (256, 256 * of_token)
    of_state, gib = 48 * (48 * 128 * 128 + 96 * 4 * (256 + 64)) * 4, 2**30
    assert shape.delta.num_bytes == of_state
    states = 16 * gib * 3 // 4 // of_state
    assert pool_slots(shape, 16 * gib) == ((16 * gib - states * of_state) // (256 * of_token), states)
    assert pool_slots(shape, of_state) == (0, 0), "a quarter is for blocks"
    assert pool_slots(KernelShape(named_spec("qwen3-4b@131072"), range(8)), gib) == (gib // (256 * 144 << 10), 0)
    assert pool_slots(KernelShape(laneformer_2b(), range(8)), gib) == (0, 0)


def test_a_block_is_the_tokens_of_all_layers() -> None:
    spec = named_spec("qwen3-4b@131072")
    shape = KernelShape(spec, range(8))
    assert block_tokens(shape) == 256
    assert block_bytes(shape) == 256 * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * 2


def test_windowed_layers_have_blocks_where_they_keep_all_positions() -> None:
    spec, codings = named_shape("gpt-oss-120b@131072")
    rings, whole = (KernelShape(spec, range(4), whole_windows=is_whole, **codings) for is_whole in (False, True))
    assert (block_tokens(rings), rings.cache.ring_positions) == (0, 240)
    assert (block_tokens(whole), whole.cache.ring_positions) == (240, 0)
    assert block_bytes(whole) == 240 * 72 << 10
    assert whole.cache.num_bytes - rings.cache.num_bytes == (131280 - 240) * 36 << 10  # whole batches of 15 splits
    assert block_tokens(KernelShape(laneformer_2b(), range(8))) == 0
    with pytest.raises(ConfigError, match="windows of 512 positions, which fill whole batches"):
        KernelShape(laneformer_2b(), range(8), whole_windows=True)
    short = replace(spec, max_context=128)
    assert KernelShape(short, range(4), whole_windows=True).cache.num_bytes == KernelShape(short, range(4)).cache.num_bytes
