"""The fused kernels of prefill.cu: on a CPU they do what the twin in array code says; built for a GPU, nothing spills."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.cuda import build as compiler
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer, laneformer_2b
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base.arrays import BFLOAT16, float32_of
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.compiled import SOURCE_FOLDERS
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.exchange import peer_exchange
from kog_dist.workers.prefill.exchange.lane_sums import OneRank
from kog_dist.workers.prefill.exchange.sums_abi import sums_header
from kog_dist.workers.prefill.lanes.layers import Layers
from kog_dist.workers.prefill.lanes.operations import PlainOperations
from kog_dist.workers.prefill.lanes.prefill_abi import prefill_header
from kog_dist.workers.prefill.prefill import HostRunner, Prefill
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import EmulatedOperations
from tests.unit.prefill.models import SMALL, Rank, layout_of, relative_error, token_ids

TINY: dict[str, Any] = {
    **SMALL, "hidden_size": 32, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 32, "num_layers": 4, "max_context": 40,
    "delay": 1, "attention_comm": False, "sliding_window": 3, "window_layers": (0, 1),
}  # fmt: skip


class Asked(OneRank):
    """A rank that makes its sums as one among others does."""

    is_alone = False


def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread block: they are expensive here."""
    for room in ("base.shared_abi", "lanes.prefill_abi"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{room}.MAX_THREADS", 32)


@needs_compiler
@pytest.mark.parametrize(
    ("held_lanes", "split_size", "overrides"),
    [
        (8, 0, {}),
        (1, 2, {}),
        (8, 0, {"attention_comm": True, "delay": 2}),
        (1, 2, {"attention_comm": True, "delay": 0, "shared_norm_scale": False}),
    ],
)
def test_kernels_are_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_lanes: int, split_size: int, overrides: dict[str, Any]
) -> None:
    monkeypatch.setattr("kog_dist.workers.prefill.lanes.prefill_abi.HELD_LANES", held_lanes)
    few_threads(monkeypatch)
    if overrides:
        monkeypatch.setattr("kog_dist.workers.prefill.lanes.layers.LATE_SIZE", 1)
    kv_dtype, spec = "bfloat16", ModelSpec(**{**TINY, **overrides})
    assert overrides or {spec.reduce_mode(layer, sublayer) for layer in range(4) for sublayer in Sublayer} == set(ReduceMode)
    write_checkpoint(tmp_path, spec, random_tensors(spec, 3), manifest=False)
    rank = Rank(
        open_checkpoint(tmp_path),
        dtype=np.float16,
        kv_dtype=kv_dtype,
        sizes=(2,),
        exact_size=3,
        split_size=split_size,
    )
    cache, embedding = np.zeros_like(rank.cache), rank.embedding()
    buffers = Buffers(rank.layout, np.float16, 3, "cpu", split_size=split_size)
    made = EmulatedOperations(buffers, embedding, cache, tmp_path, weight_dtype="bfloat16", kv_dtype=kv_dtype)
    layers = Layers(spec, rank.matrices, made, OneRank())
    runner = HostRunner(layers, buffers, (2,), exact_size=3)
    emulated = Prefill(runner, max_context=spec.max_context, sizes=(2,), exact_size=3)
    ids = token_ids(spec, 5)
    # An exact chunk; one that begins with the cache of that, as a rank among others; an ordinary one; an exact one among others.
    for found, start, asked in ((3, 0, False), (5, 3, True), (4, 0, False), (3, 0, True)):
        layers.exchange = Asked() if asked else OneRank()
        assert rank.run(ids[:found], start) == found
        emulated.forget(1)  # so that it loads the cache
        assert emulated.run(ids[:found], start, should_stop=lambda: False) == found
        wanted, got = float32_of(rank.cache), float32_of(cache)
        assert (wanted != 0).any()
        assert np.array_equal(wanted != 0, got != 0), "other places of the cache were written"
        assert relative_error(got, wanted) < 1e-3
        streams = rank.buffers.last_streams
        assert relative_error(buffers.last_streams, streams) < 1e-3
        assert (wanted != got).mean() < 0.01
    assert isinstance(rank.layers.operations, PlainOperations)


@needs_compiler
def test_padding_is_zero_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_threads(monkeypatch)
    monkeypatch.setattr("kog_dist.workers.prefill.lanes.prefill_abi.MOST_PADDING", 1)  # in chunks from 4 on
    spec = ModelSpec(**{**TINY, "attention_comm": True})
    write_checkpoint(tmp_path, spec, random_tensors(spec, 3), manifest=False)
    rank = Rank(open_checkpoint(tmp_path), dtype=np.float16, sizes=(8,), split_size=0)
    cache, embedding = np.zeros_like(rank.cache), rank.embedding()
    buffers = Buffers(rank.layout, np.float16, 8, "cpu", split_size=0)
    made = EmulatedOperations(buffers, embedding, cache, tmp_path, weight_dtype="bfloat16", kv_dtype="bfloat16")
    runner = HostRunner(Layers(spec, rank.matrices, made, OneRank()), buffers, (8,))
    emulated = Prefill(runner, max_context=spec.max_context, sizes=(8,))
    ids = token_ids(spec, 8)
    rows = runner._rows[8]
    for length in (8, 7):  # what the first leaves behind is not in the second
        assert emulated.run(ids[:length], 0, should_stop=lambda: False) == rank.run(ids[:length]) == length
        assert np.array_equal(rows.stream[:, length:], np.zeros_like(rows.stream[:, length:]))
        assert (rows.stream[:, :length] != 0).any(-1).all()
        streams = rank.buffers.last_streams
        assert relative_error(buffers.last_streams, streams) < 1e-3
        wanted, got = float32_of(rank.cache), float32_of(cache)
        assert relative_error(got, wanted) < 1e-3


@needs_compiler
@pytest.mark.parametrize("whole_windows", [False, True])
def test_positions_are_stored_as_the_twin_stores_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, whole_windows: bool
) -> None:  # fmt: skip
    few_threads(monkeypatch)
    spec = ModelSpec(**{**TINY, "max_context": 300})
    layout = layout_of(spec, spec.num_lanes, whole_windows=whole_windows)
    assert whole_windows or layout.capacity(0) < 250 < layout.capacity(3), "windows wrap, others do not"
    buffers = Buffers(layout, np.float16, 2, "cpu")
    wanted, found = (np.zeros(layout.num_values, BFLOAT16) for _ in range(2))
    twin = PlainOperations(buffers, np.zeros(1, np.float32), wanted)
    made = EmulatedOperations(buffers, np.zeros(1, np.float32), found, tmp_path, weight_dtype="bfloat16", kv_dtype="bfloat16")
    random = np.random.default_rng(1)
    for first, last in ((0, 290), (5, 8), (37, 38), (100, 250), (120, 145)):
        for kept in (buffers.keys, buffers.values):
            kept[...] = random.standard_normal(kept.shape)
        twin.store_cache(first, last)
        made.store_cache(first, last)
        assert np.array_equal(wanted, found), f"{first} to {last}"
        for kept in (buffers.keys, buffers.values):
            kept.fill(0)
        twin.load_cache(first, last)
        loaded = buffers.keys.copy(), buffers.values.copy()
        for kept in (buffers.keys, buffers.values):
            kept.fill(0)
        made.load_cache(first, last)
        assert np.array_equal(loaded, (buffers.keys, buffers.values)), f"{first} to {last}"
    buffers.overflow.fill(1)
    buffers.keys.fill(0)
    made.store_cache(0, 290)
    assert np.array_equal(wanted, found), "nothing is stored behind an overflow"


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_kernels_build_without_spills(tmp_path: Path) -> None:
    layout = CacheLayout.of(KernelShape(laneformer_2b(), range(8)))
    header = prefill_header(layout, num_positions=4096 + 512, weight_dtype="bfloat16", kv_dtype="bfloat16")
    sources = compiler.read_sources(*SOURCE_FOLDERS)
    cubin = compiler.build({**sources, "prefill_shape.cuh": header}, "prefill.cu", folder=tmp_path)
    assert "Compiling entry function 'residual_delayed'" in cubin.log
    assert "Compiling entry function 'residual_delayed_alone'" in cubin.log
    assert "spilled" not in cubin.log
    sums = compiler.build({**sources, "allreduce_shape.cuh": sums_header(8)}, "allreduce.cu", folder=tmp_path)
    assert sums.log.count("0 bytes spill stores") == len(peer_exchange._KERNELS)
