"""Attention for Hopper: how rows are cut into items; and attention.cu itself, run on a CPU, products and copies in plain C++."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.workers.prefill.attention import attention_abi, hopper_attention
from kog_dist.workers.prefill.attention.attention_abi import ATTENTION_PARAMS, AttentionShape, misfit
from kog_dist.workers.prefill.attention.hopper_attention import Attention, AttentionPlan, build, most_parts_bytes, plan
from kog_dist.workers.prefill.base.chunks import CHUNK_SIZES
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.prefill.emulated import compiled, launcher, map_on_cpu
from tests.unit.prefill.models import ordered, relative_error

SHAPE_2B = AttentionShape(96, num_heads=32, num_kv_heads=16, lane_heads=4)
QWEN3_4B = AttentionShape(128, num_heads=32, num_kv_heads=8, lane_heads=4)
NUM_SMS, MAX_CONTEXT = 132, 4096


def test_items_of_the_2b_shape() -> None:
    plans = {
        (size, window): plan(SHAPE_2B, size, window, MAX_CONTEXT - 1 + size, NUM_SMS)
        for size in (1, 64, 128, 256, 512, 1024, 2048, 4096)
        for window in (512, None)
    }
    of_one_group = {key for key, made in plans.items() if made.num_groups == 1}
    assert of_one_group == {(1, None), (1, 512), (64, 512), (128, 512), (256, 512)}
    assert {key for key, made in plans.items() if made.num_groups == 4} == {(size, None) for size in (1024, 2048, 4096)}
    assert {size for (size, _), made in plans.items() if made.num_units} == {1, 64, 128, 256}
    for (size, window), made in plans.items():
        assert (made.num_tiles - 1) * made.num_groups * 32 < size <= made.num_tiles * made.num_groups * 32
        assert made.is_partitioned == (window is None), "bits depend on the window alone"
        assert made.num_items == made.num_tiles * 16 * (made.num_units or 1)
        num_ctas_of_item = 2 if made.num_groups == 4 else 1
        assert made.num_ctas == min(num_ctas_of_item * made.num_items, NUM_SMS)
        if made.num_units:
            assert made.first_partitions == 1
            assert made.num_units == attention_abi.num_partitions(MAX_CONTEXT - 1 + size)


def test_partitions_are_short_at_the_beginning_of_the_context() -> None:
    keys = (1, 1024, 1025, 8192, 8193, 12288, 12289)
    assert [attention_abi.num_partitions(count) for count in keys] == [1, 1, 2, 8, 9, 9, 10]


def busy(made: AttentionPlan, shape: AttentionShape, size: int, start: int) -> float:
    """The share of the time that multiprocessors attend to tiles of keys, as attention_items.cuh deals items out."""
    heads, positions = shape.num_heads // shape.pack, 64 // shape.pack * made.num_groups
    first, short, long = (
        number // shape.keys
        for number in (attention_abi.PARTITION_KEYS, attention_abi.SHORT_PARTITIONS * attention_abi.PARTITION_KEYS,
                       attention_abi.LONG_PARTITION_KEYS)
    )  # fmt: skip
    bounds = [*range(0, short, first), *range(short, 10**4, long)]
    units = [0, *bounds[made.first_partitions :]]
    num_ctas = made.num_ctas // (2 if made.num_groups == 4 else 1)  # or pairs of them
    tiles = np.zeros(num_ctas, int)
    seen = [(start + min(size, (tile + 1) * positions) - 1) // shape.keys + 1 for tile in range(made.num_tiles)]
    if made.num_units:
        found = [unit for unit in range(made.num_units) if units[unit] < seen[-1]]
        num_short = attention_abi.SHORT_PARTITIONS if made.first_partitions == 1 else 0
        items = [max(0, min(end, units[i + 1]) - units[i]) for i in found[num_short:] + found[:num_short] for end in seen]
    else:
        items = seen[::-1]
    for index, count in enumerate(np.repeat(items, heads)):
        turn, at = divmod(index, num_ctas)
        tiles[num_ctas - 1 - at if turn % 2 else at] += count
    assert tiles.sum() == sum(seen) * heads
    return float(tiles.sum() / (NUM_SMS * num_ctas // made.num_ctas) / tiles.max())


@pytest.mark.parametrize("max_context", [32768, 66000])
def test_rows_behind_a_long_context_keep_all_multiprocessors_busy(max_context: int) -> None:
    plans = {size: plan(QWEN3_4B, size, None, max_context - 1 + size, NUM_SMS) for size in (1, *CHUNK_SIZES)}
    assert plans[1].num_items == 8 * plans[1].num_units
    assert {size for size, made in plans.items() if made.first_partitions > 1} == {384, 640, 768}
    shares = {(size, start): busy(made, QWEN3_4B, size, start)
              for size, made in plans.items() if size > 1 for start in (20600, max_context - size)}  # fmt: skip
    assert min(shares.values()) > 0.75, shares
    behind_few = [busy(made, QWEN3_4B, size, 20600) for size, made in plans.items() if size >= 384]
    assert min(behind_few) > 0.84, "items that are dealt out as wholes leave up to 39 % of the time"
    most = most_parts_bytes(QWEN3_4B, plans, max_context, NUM_SMS)
    assert most == max(made.parts_bytes(QWEN3_4B) for made in plans.values()) <= 320 << 20


def test_units_that_would_take_too_much_memory_are_left_out() -> None:
    assert plan(QWEN3_4B, 640, None, 66000, NUM_SMS).num_units
    assert not plan(QWEN3_4B, 640, None, 660000, NUM_SMS).num_units


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


def emulated(folder: Path, shape: AttentionShape, max_context: int) -> list[Attention]:
    """attention.cu on a CPU: as on two multiprocessors, and on so many that units of several partitions, or of one, are items."""
    kernels = ("attend", "attend_pairs", "combine")
    path = compiled(
        folder, "attention", shape.constants(), kernels, "AttentionLaunch", optimize="-Og", clusters={"attend_pairs": 2}
    )
    library = ctypes.CDLL(str(path))
    launchers = {name: launcher(library, name, ATTENTION_PARAMS.size_bytes) for name in kernels}
    return [Attention(shape, max_context, num_sms, launchers, map_on_cpu) for num_sms in (2, 3, 8)]


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
    for name, value in (("PARTITION_KEYS", 64), ("SHORT_PARTITIONS", 2), ("LONG_PARTITION_KEYS", 128)):
        for module in (hopper_attention, attention_abi):
            monkeypatch.setattr(module, name, value, raising=module is attention_abi)
    max_context, shape = 300, AttentionShape(48, num_heads=2, num_kv_heads=1, lane_heads=1, keys=64)
    few, some, many = emulated(tmp_path, shape, max_context)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (
        torch.randn(max_context + 80, heads, shape.head_dim, generator=generator).half() for heads in (shape.num_heads, 1, 1)
    )
    given = np.array([0.7, 3.1], np.float32)
    cases = (
        (None, 44, 240, None), (None, 150, 120, None), (None, 230, 70, None), (None, 299, 1, given), (None, 10, 40, given),
        (40, 130, 50, given), (150, 260, 33, given),
    )  # fmt: skip
    plans = [
        plan(shape, size, None, max_context - 1 + size, made.num_sms) for _, _, size, _ in cases for made in (few, some, many)
    ]
    assert {made.first_partitions for made in plans if made.num_units} == {1, 2}, "cases meet both kinds of units"
    assert {(made.num_groups, made.num_units > 0) for made in plans} >= {(1, True), (2, True), (4, False), (4, True)}
    for window, start, size, sinks in cases:
        place = np.array([start, 0, start + size], np.int32)
        arguments = query[start : start + size].numpy(), keys.numpy(), values.numpy(), place, window, sinks
        found = many.run(*arguments).copy()
        reference = wanted(shape, query[start : start + size], keys, values, start, window, sinks)
        assert relative_error(found, reference) < 1e-3, (window, start, size)
        for other in (few, some):
            assert np.array_equal(found, other.run(*arguments)), f"units that are items of their own change bits: {window, size}"
        if size > 1:
            row = np.array([start + size - 2], np.int32)
            alone = many.run(arguments[0][-2:-1], *arguments[1:3], row, window, sinks)
            assert np.array_equal(alone[:, 0], found[:, -2]), "a row has other bits elsewhere"
        for made in (few, many):  # of each head the first 32 columns: others are no whole group
            by_head = made.run(*arguments, is_ordered=True).reshape(-1, shape.head_dim)
            plain = found.reshape(-1, shape.head_dim)
            assert np.array_equal(by_head[:, :32], ordered(plain[:, :32])), (window, size)
            assert np.array_equal(by_head[:, 32:], plain[:, 32:]), (window, size)


@pytest.mark.sweep
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("shape", [SHAPE_2B, QWEN3_4B], ids=["2b", "qwen3-4b"])
def test_the_kernel_builds_without_spills(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shape: AttentionShape) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    log = build(shape).log
    assert log.count("0 bytes spill stores") == 3
    assert "serialized" not in log, "products wait for each other"
