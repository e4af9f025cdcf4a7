"""Prefill of models with one residual stream: its kernels are their twin, its values stay in range, memory is counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.shapes import named_spec
from kog_dist.cuda import build as compiler
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.arrays import float32_of
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import MOST_FLOP, Chunk, Work
from kog_dist.workers.prefill.base.compiled import SOURCE_FOLDERS
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, dense_buffer_bytes
from kog_dist.workers.prefill.dense.dense_abi import dense_header
from kog_dist.workers.prefill.dense.device import KERNELS
from kog_dist.workers.prefill.dense.layers import DenseLayers
from kog_dist.workers.prefill.exchange.lane_sums import OneRank
from kog_dist.workers.prefill.prefill import HostRunner, Prefill
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import EmulatedDenseOperations
from tests.unit.prefill.models import SMALL, Rank, layout_of, ordered, relative_error, token_ids

DENSE: dict[str, Any] = {**SMALL, "delay": 0}
TINY: dict[str, Any] = {
    **DENSE, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 32, "num_layers": 4, "max_context": 40,
    "sliding_window": 3, "window_layers": (0, 1),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one lane": {"num_lanes": 1, "sliding_window": None, "window_layers": ()},
    "biases, normed heads": {"own_head_dim": 8, "qkv_bias": True, "qk_norm": True, "num_lanes": 2},
    "rows of several turns": {"hidden_size": 2 * 256 + 32, "num_heads": 8, "own_head_dim": 8},
    "experts, sinks, biases of sums": {
        "attention_sinks": True, "out_bias": True, "num_lanes": 2, "experts": ExpertsSpec(4, 2, router_bias=True, bias=True),
    },
    "a cache of fp8": {"own_head_dim": 32},
    "a cache of int4": {  # many shuffles for each row
        "own_head_dim": 64, "num_heads": 4, "num_kv_heads": 2, "num_lanes": 2, "num_layers": 2, "window_layers": (0,)
    },
}  # fmt: skip
KV_OF_VARIANT = {"a cache of fp8": "fp8", "a cache of int4": "int4"}  # others: bfloat16


class Asked(OneRank):
    """A rank that makes its sums as one among others does."""

    is_alone = False


def checkpoint_of(folder: Path, overrides: dict[str, Any]) -> Checkpoint:
    write_checkpoint(folder, ModelSpec(**overrides), random_tensors(ModelSpec(**overrides), 3), manifest=False)
    return open_checkpoint(folder)


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_are_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    for place in ("base.shared_abi", "dense.dense_abi", "dense.device"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{place}.MAX_THREADS", 32)  # threads are expensive here
    monkeypatch.setattr("kog_dist.workers.prefill.dense.device._LOADING", 3)
    checkpoint = checkpoint_of(tmp_path, {**TINY, **VARIANTS[variant]})
    spec, sizes = checkpoint.spec, (2, 3)
    kv_dtype = KV_OF_VARIANT.get(variant, "bfloat16")
    rank = Rank(checkpoint, dtype=np.float16, kv_dtype=kv_dtype, sizes=sizes)
    cache, embedding = np.zeros_like(rank.cache), rank.embedding()
    buffers = DenseBuffers(rank.layout, np.float16, max(sizes), "cpu")
    made = EmulatedDenseOperations(
        buffers, embedding, cache, tmp_path, weight_dtype="bfloat16", kv_dtype=kv_dtype, of_layers=rank.experts
    )
    layers = DenseLayers(spec, rank.matrices, made, OneRank())
    emulated = Prefill(HostRunner(layers, buffers, sizes), max_context=spec.max_context, sizes=sizes)
    ids = token_ids(spec, 11)
    # A chunk with padding; one behind the cache of it, as a rank among others; several; one behind them.
    for end, start, asked in ((4, 0, False), (7, 4, True), (9, 0, False), (11, 9, False)):
        layers.exchange = Asked() if asked else OneRank()
        buffers.keys.fill(9), buffers.values.fill(9)  # what a layer sees comes from the cache
        assert rank.run(ids[:end], start) == end
        assert emulated.run(ids[:end], start, should_stop=lambda: False) == end
        wanted, got = float32_of(rank.cache), float32_of(cache)
        assert np.array_equal(wanted != 0, got != 0), "other places of the cache were written"
        assert relative_error(got, wanted) < 1e-3
        assert (wanted != got).mean() < 0.01
        assert relative_error(buffers.last_streams, rank.buffers.last_streams) < 1e-3


@needs_compiler
def test_what_is_multiplied_on_the_tape_is_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of x, by both kernels that write it; the last threads of a row have nothing."""
    for place in ("base.shared_abi", "dense.dense_abi", "dense.device"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{place}.MAX_THREADS", 32)
    checkpoint = checkpoint_of(tmp_path, {**TINY, **VARIANTS["rows of several turns"]})
    rank = Rank(checkpoint, dtype=np.float16, sizes=(3,))
    buffers = DenseBuffers(rank.layout, np.float16, 3, "cpu")
    made = EmulatedDenseOperations(buffers, rank.embedding(), rank.cache, tmp_path, weight_dtype="bfloat16", kv_dtype="bfloat16")
    norm = np.random.default_rng(2).standard_normal(checkpoint.spec.hidden_size, np.float32)
    rows, found = buffers.rows(3), []
    for tape in (None, SimpleNamespace()):
        made.tape = tape  # type: ignore[assignment]
        buffers.prompt[:3], buffers.last_position[0], rows.place[0] = (5, 6, 7), 2, 0
        made.embed(rows, norm)
        embedded = rows.x.copy()
        rows.partial[...] = np.arange(rows.partial.size, dtype=np.float16).reshape(rows.partial.shape) % 13
        made.residual(rows, 1.0, None, norm)
        found.append((embedded, rows.x.copy()))
    for plain, other in zip(*found, strict=True):
        assert np.array_equal(ordered(plain), other)
        assert not np.array_equal(plain, other)


@needs_compiler
@pytest.mark.parametrize("whole_windows", [False, True])
def test_kernels_load_and_store_as_the_twin_does_where_windows_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, whole_windows: bool
) -> None:  # fmt: skip
    for place in ("base.shared_abi", "dense.dense_abi", "dense.device"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{place}.MAX_THREADS", 32)
    monkeypatch.setattr("kog_dist.workers.prefill.dense.device._LOADING", 2)
    checkpoint = checkpoint_of(tmp_path, {**TINY, "max_context": 300, "num_layers": 2, "window_layers": (0,)})
    rank = Rank(checkpoint, dtype=np.float16, sizes=(64, 160), whole_windows=whole_windows)
    assert whole_windows or rank.layout.capacity(0) < 150 < rank.layout.capacity(1)
    cache, buffers = np.zeros_like(rank.cache), DenseBuffers(rank.layout, np.float16, 160, "cpu")
    embedding = rank.embedding()
    made = EmulatedDenseOperations(buffers, embedding, cache, tmp_path, weight_dtype="bfloat16", kv_dtype="bfloat16")
    layers = DenseLayers(checkpoint.spec, rank.matrices, made, OneRank())
    emulated = Prefill(HostRunner(layers, buffers, (64, 160)), max_context=300, sizes=(64, 160))
    ids = token_ids(checkpoint.spec, 290)
    for end, start in ((150, 0), (290, 147)):
        assert emulated.run(ids[:end], start, should_stop=lambda: False) == rank.run(ids[:end], start) == end
        assert np.array_equal(rank.cache != 0, cache != 0)
        assert relative_error(float32_of(cache), float32_of(rank.cache)) < 1e-3


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-0.6b", "qwen2.5-coder-7b"])
def test_kernels_build_without_spills(tmp_path: Path, name: str) -> None:
    spec = named_spec(name)
    layout = CacheLayout.of(KernelShape(spec, range(spec.num_lanes)))
    sources = {
        **compiler.read_sources(*SOURCE_FOLDERS),
        "dense_shape.cuh": dense_header(layout, weight_dtype="bfloat16", kv_dtype="bfloat16"),
    }
    cubin = compiler.build(sources, "dense.cu", folder=tmp_path)
    assert cubin.log.count("0 bytes spill stores, 0 bytes spill loads") == len(KERNELS)


def test_large_streams_and_activations_do_not_overflow(tmp_path: Path) -> None:
    """What binary16 could not hold: a stream beyond 65,504, as some models' outliers have, and activations of a million."""
    checkpoint = checkpoint_of(tmp_path, {**DENSE, "num_layers": 3, "window_layers": (0,)})
    rank, exact = (Rank(checkpoint, dtype=dtype) for dtype in (np.float16, np.float32))
    ids = token_ids(checkpoint.spec, 40)
    for one in (rank, exact):
        one.matrices[0].wo[:, 5] = 300  # of one column of the stream, as outliers are
        one.matrices[0].w2[:, 7] = 20000
        one.matrices[1].w13[:, 3] = one.matrices[1].w13[:, 32 + 3] = 9  # a gate and its up
        assert one.run(ids) == len(ids)
    assert np.abs(exact.layers.operations.buffers.last_streams).max() > 65504
    runners: list[Any] = [one.prefill._runner for one in (rank, exact)]
    activations = [float(np.abs(runner._rows[16].activation).max()) for runner in runners]
    assert activations[1] / ACTIVATION_SCALE > 1000
    assert relative_error(rank.buffers.last_streams, exact.buffers.last_streams) < 2e-3
    assert relative_error(float32_of(rank.cache), float32_of(exact.cache)) < 5e-3


def test_a_chunk_in_parts_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, DENSE)
    whole = Rank(checkpoint, dtype=np.float16)
    cut = Rank(checkpoint, dtype=np.float16, work=Work(row_flop=MOST_FLOP / 12, most_parts=5, max_context=256))
    ids, seen, queued = token_ids(checkpoint.spec, 60), list[int](), list[tuple[int, int, int]]()
    runner: Any = cut.prefill._runner
    queue = runner.queue

    def noting(chunk: Chunk, part: int) -> Callable[[], bool]:
        queued.append((chunk.start, part, chunk.num_parts))
        return queue(chunk, part)  # type: ignore[no-any-return]

    runner.queue = noting
    asked = iter([False] * 8 + [True])
    assert whole.run(ids) == len(ids)
    reached = cut.prefill.run(ids, 0, should_stop=lambda: next(asked), on_progress=seen.append)
    assert reached == 32, "two parts of the third chunk count for nothing"
    assert seen == [16, 32]
    assert queued == [(start, part, 3) for start in (0, 16, 32) for part in range(3)][:-1]
    assert cut.run(ids, reached) == len(ids)
    assert queued[8:] == [*((start, part, 3) for start in (32,) for part in range(3)), (48, 0, 3), (48, 1, 3), (48, 2, 3)]
    assert np.array_equal(whole.cache, cut.cache)
    assert np.array_equal(whole.buffers.last_streams, cut.buffers.last_streams)


def test_a_value_out_of_range_gives_the_cache_up(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, DENSE)
    rank, fresh = (Rank(checkpoint, dtype=np.float16) for _ in range(2))
    ids = token_ids(checkpoint.spec, 141)
    rank.run(ids[:20])
    wqkv = rank.matrices[2].wqkv.copy()
    np.multiply(rank.matrices[2].wqkv, 60000, out=rank.matrices[2].wqkv)
    assert rank.run(ids, 20) == 0, "layers before the third have been stored: the kernel begins anew"
    assert bool(np.isfinite(rank.buffers.values).all())
    rank.matrices[2].wqkv[...] = wqkv
    w2 = rank.matrices[-1].w2.copy()
    rank.matrices[-1].w2.fill(np.inf)  # which only the prompt's last token needs
    assert rank.run(ids) == 0
    rank.matrices[-1].w2[...] = w2
    assert rank.run(ids) == fresh.run(ids) == len(ids), "the next request is unharmed"
    assert np.array_equal(rank.cache, fresh.cache)


def test_one_layer_of_plain_keys_and_values_is_kept() -> None:
    spec = ModelSpec(**DENSE)
    buffers = DenseBuffers(layout_of(spec, 4), np.float16, 16, "cpu")
    for size in (8, 16):
        buffers.rows(size)
    buffers.last_rows()
    assert buffers.keys.shape == (1, 256 + 16, 8, spec.head_dim)
    assert dense_buffer_bytes(buffers.layout, 16) == buffers.num_bytes
