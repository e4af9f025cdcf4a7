"""Attention for Hopper: how rows are cut into items; and attention.cu itself, run on a CPU, products and copies in plain C++."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.workers.prefill.attention import attention_abi
from kog_dist.workers.prefill.attention.attention_abi import ATTENTION_PARAMS, AttentionShape, misfit
from kog_dist.workers.prefill.attention.hopper_attention import Attention, build, most_parts_bytes, plan
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu
from tests.unit.prefill.models import relative_error

SHAPE_2B = AttentionShape(96, num_heads=32, num_kv_heads=16, lane_heads=4)
NUM_SMS, MAX_CONTEXT = 132, 4096


def test_items_of_the_2b_shape() -> None:
    plans = {
        (size, window): plan(SHAPE_2B, size, window, MAX_CONTEXT - 1 + size, NUM_SMS)
        for size in (1, 64, 128, 256, 512, 1024, 2048, 4096)
        for window in (512, None)
    }
    of_one_group = {key for key, made in plans.items() if made.num_groups == 1}
    assert of_one_group == {(1, None), (1, 512), (64, 512), (128, 512), (256, 512)}
    assert {size for (size, _), made in plans.items() if made.num_partitions} == {1, 64, 128, 256}
    for (size, window), made in plans.items():
        assert (made.num_tiles - 1) * made.num_groups * 32 < size <= made.num_tiles * made.num_groups * 32
        assert made.is_partitioned == (window is None), "bits depend on the window alone"
        assert made.num_items == made.num_tiles * 16 * (made.num_partitions or 1)
        assert made.num_ctas == min(made.num_items, NUM_SMS)
        if made.num_partitions:
            assert made.num_partitions * attention_abi.PARTITION_KEYS >= MAX_CONTEXT - 1 + size


@pytest.mark.parametrize("max_context", [16384, 40960, 131072])
def test_few_rows_behind_a_long_context_keep_all_multiprocessors_busy(max_context: int) -> None:
    qwen3_4b = AttentionShape(128, num_heads=32, num_kv_heads=8, lane_heads=4)
    plans = {size: plan(qwen3_4b, size, None, max_context - 1 + size, NUM_SMS) for size in (1, 128, 256, 512)}
    assert plans[1].num_items == 8 * plans[1].num_partitions
    assert plans[128].num_partitions == -(-(max_context + 127) // 1024)
    assert all(made.num_items > 0.9 * NUM_SMS for made in plans.values())
    most = most_parts_bytes(qwen3_4b, plans, max_context, NUM_SMS)
    assert most == max(made.parts_bytes(qwen3_4b) for made in plans.values()) <= 320 << 20


@pytest.mark.parametrize(
    ("shape", "pack", "panel"),
    [
        (SHAPE_2B, 2, 32),
        (AttentionShape(128, 8, 1, 8), 8, 64),
        (AttentionShape(48, 6, 2, 6), 1, 16),
        (AttentionShape(64, 4, 4, 4), 1, 64),
        (AttentionShape(16, 2, 1, 2, keys=64), 2, 16),
    ],
)
def test_a_shape_fits_into_shared_memory(shape: AttentionShape, pack: int, panel: int) -> None:
    assert (shape.pack, shape.panel) == (pack, panel)
    assert shape.slots >= 4, "keys and values of two steps"
    assert shape.shared_bytes <= 227 << 10


def test_other_heads_are_named() -> None:
    assert misfit(96) == ""
    assert "40 values" in misfit(40)
    assert "144 values" in misfit(144)


def emulated(folder: Path, shape: AttentionShape, max_context: int) -> tuple[Attention, Attention]:
    """attention.cu on a CPU, as on two multiprocessors, and on so many that partitions are items of their own."""
    path = compiled(folder, "attention", shape.constants(), ("attend", "combine"), "AttentionLaunch", optimize="-O1")
    library = ctypes.CDLL(str(path))
    launchers = {name: launcher(library, name, ATTENTION_PARAMS.size_bytes) for name in ("attend", "combine")}
    few, many = (Attention(shape, max_context, num_sms, launchers, map_on_cpu) for num_sms in (2, 6))
    return few, many


def wanted(
    shape: AttentionShape, query: Any, keys: Any, values: Any, start: int, window: int | None, sinks: Any
) -> torch.Tensor:  # fmt: skip
    """(lanes, size, heads of a lane * head_dim) in float64."""
    size, end = len(query), start + len(query)
    positions, others = torch.arange(start, end)[:, None], torch.arange(end)
    seen = (others <= positions) & (others > positions - (window or end + 1))
    q, k, v = (x.double().transpose(0, 1) for x in (query, keys[:end], values[:end]))
    k, v = k.repeat_interleave(shape.share, 0), v.repeat_interleave(shape.share, 0)
    scores = (q @ k.transpose(1, 2)) * shape.head_dim**-0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, torch.from_numpy(sinks).double()[:, None, None].expand(-1, size, 1)], -1)
    mixed = (scores.softmax(-1)[..., :end] @ v).transpose(0, 1)  # (size, heads, head_dim)
    by_lane: torch.Tensor = mixed.reshape(size, -1, shape.lane_heads * shape.head_dim).transpose(0, 1)
    return by_lane


@needs_compiler
def test_the_kernel_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention.hopper_attention", "attention.attention_abi"):
        monkeypatch.setattr(f"kog_dist.workers.prefill.{module}.PARTITION_KEYS", 128)
    max_context, shape = 300, AttentionShape(48, num_heads=2, num_kv_heads=1, lane_heads=1, keys=64)
    few, many = emulated(tmp_path, shape, max_context)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(max_context + 80, heads, shape.head_dim, generator=generator).half() for heads in (shape.num_heads, 1, 1)
    )
    given = np.array([0.7, 3.1], np.float32)
    cases = ((None, 230, 70, None), (None, 299, 1, given), (40, 130, 50, given), (150, 260, 33, given))
    for window, start, size, sinks in cases:
        place = np.array([start, 0, start + size], np.int32)
        arguments = query[start : start + size].numpy(), keys.numpy(), values.numpy(), place, window, sinks
        found = many.run(*arguments).copy()
        reference = wanted(shape, query[start : start + size], keys, values, start, window, sinks)
        assert relative_error(found, reference) < 1e-3, (window, start, size)
        if window is None:
            assert np.array_equal(found, few.run(*arguments)), "partitions that are items of their own change bits"
        if size > 1:
            row = np.array([start + size - 2], np.int32)
            alone = many.run(arguments[0][-2:-1], *arguments[1:3], row, window, sinks)
            assert np.array_equal(alone[:, 0], found[:, -2]), "a row has other bits elsewhere"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_kernel_builds_without_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = build(SHAPE_2B).log
    assert log.count("0 bytes spill stores") == 2
    assert "serialized" not in log, "products wait for each other"
