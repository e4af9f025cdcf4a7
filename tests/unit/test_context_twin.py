"""The monokernel's attention on a CPU (decode_twin/) far into a context, from a cache in prefill's layout, against the oracle.

Splits have so many batches here that warps fill both of their buffers again, and windowed layers write over the oldest rows; or
keep all of them, which gives the same bits. CONTEXT_TWIN=all compares these on two sets of query heads too, from all starts.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.decode.kv_formats import INT4_KEY_LEVELS, INT4_VALUE_LEVELS, KV_FORMATS, _rotated, encode_int4, rotation_factors
from kog_dist.model.kv_oracle import KvForm
from kog_dist.model.laneformer import KvCache, Laneformer, LaneLayer
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.published import Published, Words
from kog_dist.workers.cuda.ring_shape import NEAR_CONTEXT
from kog_dist.workers.prefill.base.arrays import BFLOAT16, Array, float32_of, rounded
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from tests.sweeps import cases
from tests.unit.cpu_compiler import needs_compiler
from tests.unit.test_decode_twin import Model, build_twin, twin_sources

pytestmark = [needs_compiler, pytest.mark.timeout(300)]  # two builds, and all their threads on one core
STEPS = 8  # five or six to a boundary and the rest behind it, in launches of two, two and four
BOUNDARY = 5e-3  # of a step between two codes of INT4: as near a value must be to have the code on the other side
LIMIT_US = 2_000_000  # of waits; a turn of all threads takes 10 ns
# The context has 19 batches in a split, the window 9, of which the last is not full. Five and three are the first warp's.
CONTEXT, WINDOW = 2320, 1100
RING = 9 * 16 * 8
# The start; where the first row leaves the window; where the ring begins anew; where it does so again, and the other layers
# begin a batch; where those begin a part, in the middle of a launch.
FIRST = (0, WINDOW, RING - 6, 2 * RING - 6, 2048 - 5)
OF_RINGS = FIRST[2:4]  # left out where windowed layers have none
RUNS_ALL = os.environ.get("CONTEXT_TWIN") == "all"
STARTS_APART = {"fp8": 2, "int4": 4}  # slower to emulate: some of the starts
AWAITED = NEAR_CONTEXT - 4  # where a launch of INT4 begins to wait for its own attention, in its middle
PARTS = {48: 8, 64: 4, 256: 4}  # batches of a part, by the values of a head: three parts, five
LOADED, STORED = "load_global(from + i * kStride, v)", "(to + i * kStride) ="
LOADED_SCALES, STORED_SCALES = "load_global(scales,", "(scales_at(self, rows, rows.fresh_batch)) ="
# Words of a part have other writers in another layer, which come to it behind the ones before.
PUBLISHES = "    const u32 place = unit % kHeadUnits;\n    store_relaxed_x2(base + kPartOffset"
NOTED = "    if (tag % (kLayers + 1) == (kFirstFull + 1) % (kLayers + 1)) twin::write_words(lane_idx, partition, row, unit);\n"
HEADS = {  # values of a head, so registers of a share: in pairs; more than one chunk of four; as 256 is, whose values come late
    48: ModelSpec(
        hidden_size=192, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=76, max_context=CONTEXT,
        num_lanes=2, delay=1, sliding_window=WINDOW, window_layers=(0, 2),
    ),
    64: ModelSpec(
        hidden_size=256, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=64, vocab_size=76, max_context=CONTEXT,
        num_lanes=1, delay=0, sliding_window=WINDOW, window_layers=(1, 2),
    ),
}  # fmt: skip
HEADS[256] = HEADS[64]
CASES = [
    (48, 4, "bfloat16"),
    (256, 4, "bfloat16"),
    (256, 4, "fp8"),
    *((64, num_heads, kv_dtype) for num_heads in (4, 10) for kv_dtype in ("bfloat16", "fp8", "int4")),
]
SWEPT = ((48, 4, "bfloat16"), (256, 4, "bfloat16"), (64, 4, "fp8"), (64, 10, "bfloat16"), (64, 10, "fp8"))


@pytest.mark.parametrize(("head_dim", "num_heads", "kv_dtype"), cases(CASES, SWEPT))
def test_attention_far_into_a_context_goes_on_from_what_prefill_has_kept(
    head_dim: int, num_heads: int, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 10 heads a warp has two sets of query heads, of three and two: where rows lie and when does not depend on them."""
    spec, is_coded = replace(HEADS[head_dim], num_heads=num_heads, own_head_dim=head_dim), kv_dtype in KV_FORMATS
    if kv_dtype == "int4" and num_heads == 4:  # the first of several lanes waits for the attention of all
        spec = replace(spec, num_lanes=2, shared_norm_scale=True)
    model = Model(spec, "bfloat16", monkeypatch)
    for name, words in model.words.items():  # sharp scores: what one position gets wrong shows
        if name.endswith("wq.weight"):
            values = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)
            model.words[name] = (values * 4).view(torch.int16).numpy().view(np.uint16)
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, CONTEXT).astype(np.uint32)
    oracle = Laneformer(spec, seed=None).double()
    weights = {name: torch.from_numpy(words.view(np.int16)).view(torch.bfloat16) for name, words in model.words.items()}
    oracle.load_state_dict(weights)
    oracle.round_keys_and_values(kv_dtype if is_coded else torch.bfloat16)
    exact = exact_rows(oracle)
    kept = KvCache()
    with torch.no_grad():
        wanted = oracle(torch.from_numpy(ids.astype(np.int64))[None], kept)[0].numpy()

    kept_values = (part[:, 0].float().numpy().swapaxes(1, 2) for part in kept._layers)
    rows = [values if is_coded else rounded(values, BFLOAT16) for values in kept_values]
    found: list[dict[int, bytes]] = []
    has_two_sets = num_heads > 4
    for whole_windows in (False, True) if RUNS_ALL or not has_two_sets else (False,):
        shape = TrialShape(
            spec, range(spec.num_lanes), max_ctas=5, copies=2, max_slots=6, partition_batches=PARTS[head_dim],
            kv_dtype=kv_dtype, whole_windows=whole_windows,
        )  # fmt: skip
        cache = shape.cache
        assert (cache.window_batches, cache.full_batches, cache.num_partitions) == (9, 19, 3 if head_dim == 48 else 5)
        folder = tmp_path / f"{whole_windows}"
        folder.mkdir()
        prepare(shape, model, ids, folder)
        apart = 1 if RUNS_ALL else max(STARTS_APART.get(kv_dtype, 1), 2 if has_two_sets else 1)
        starts = FIRST[::apart] if spec.num_lanes == 1 or kv_dtype != "int4" else (AWAITED, FIRST[-1])
        found.append(logits_behind(shape, rows, exact, wanted, folder, starts))
    assert all(len(logits) > 1 for logits in found)
    for others in found[1:]:
        assert {first: found[0][first] for first in others} == others, "windowed layers that keep all positions give other bits"


def logits_behind(
    shape: KernelShape, rows: list[Array], exact: list[list[Array]], wanted: Array, folder: Path, starts: Sequence[int]
) -> dict[int, bytes]:  # fmt: skip
    """By start the logits of the last token that the program in `folder` decodes from there on; checks them and the new rows.

    Of the starts those that this cache's layout has.
    """
    spec, kv_dtype, layout = shape.spec, shape.kv_dtype, CacheLayout.of(shape)
    is_coded, all_logits = kv_dtype in KV_FORMATS, dict[int, bytes]()
    before, firsts = {}, [first for first in starts if layout.has_rings or first not in OF_RINGS]
    for first in firsts:
        # Nobody may see what is not stored: 1,000; codes of 16, scales of 139.
        cache: Array = np.full(layout.num_values, *((0x58, np.uint8) if is_coded else (0x447A, BFLOAT16)))
        for layer, (keys, values) in enumerate(rows):
            gone = max(0, first + 1 - WINDOW) if layer in spec.window_layers else 0  # positions behind the window
            layout.store(cache, layer, gone, keys[gone:first], values[gone:first])
        before[first] = cache
        cache.tofile(folder / f"kv.{first}.bin")
    command = ["./context", ".", *map(str, (shape.cache.num_bytes, shape.words.num_words, STEPS, LIMIT_US, *firsts))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"ended with {done.returncode} (6: two threads had to do with one row; see context.cpp)"
    for number, first in enumerate(firsts):
        after = np.fromfile(folder / f"kept.{first}.bin", cache.dtype)
        for layer, parts in enumerate(rows):
            for is_value, (part, found) in enumerate(zip(parts, layout.load(after, layer, first, first + STEPS), strict=True)):
                new, kept_rows = float32_of(part[first : first + STEPS]), float32_of(found)
                if kv_dtype == "int4":
                    levels = INT4_VALUE_LEVELS if is_value else INT4_KEY_LEVELS
                    new = on_their_side(new, kept_rows, exact[layer][is_value][first : first + STEPS], levels)
                error = np.linalg.norm(kept_rows - new, axis=(1, 2)) / np.linalg.norm(new, axis=(1, 2))
                # A code of FP8 may fall on the other side of a boundary.
                assert error.max() < (3e-2 if kv_dtype == "fp8" else 4e-3), f"rows of layer {layer} from {first} on: {error}"
            layout.store(after, layer, first, *(part[first : first + STEPS] for part in parts))
            layout.store(before[first], layer, first, *(part[first : first + STEPS] for part in parts))
        assert np.array_equal(after, before[first]), f"from {first} on other rows than the new ones were written"
        logits = np.fromfile(folder / f"logits.{first}.bin", np.float32)
        all_logits[first] = logits.tobytes()
        last = wanted[first + STEPS - 1]
        assert np.linalg.norm(logits - last) / np.linalg.norm(last) < (1.5e-2 if is_coded else 2e-3), f"from {first} on"
        check_later_parts(shape, np.fromfile(folder / f"words.{first}.bin", np.uint64), first, number)
    return all_logits


def exact_rows(oracle: Laneformer) -> list[list[Array]]:
    """For each layer (time, heads, head_dim) of keys and of values before they were rounded, once the oracle has run."""
    exact: list[list[Array]] = []
    for layer in oracle.model.layers:
        assert isinstance(layer, LaneLayer)
        form = layer.attention.kv_form
        assert form is not None
        exact.append([np.empty(0), np.empty(0)])

        def enter(rows: torch.Tensor, which: int, of_layer: list[Array], form: KvForm) -> torch.Tensor:
            of_layer[which] = rows[0].float().numpy().swapaxes(0, 1).copy()
            return form[which](rows)

        layer.attention.kv_form = KvForm(*(partial(enter, which=which, of_layer=exact[-1], form=form) for which in (0, 1)))
    return exact


def on_their_side(new: Array, found: Array, exact: Array, levels: int) -> Array:
    """`new`, but `found` in rows with a code on the other side of a boundary, where the exact values lie there."""
    codes, scales = encode_int4(found, levels)
    steps = _rotated(exact, rotation_factors(exact.shape[-1])[0]) / (2 * scales.astype(np.float32)) + (levels - 1) / 2
    is_near = np.abs(codes - np.clip(steps, 0, levels - 1)) < 0.5 + BOUNDARY
    own_codes, own_scales = encode_int4(new, levels)
    is_moved = (codes != own_codes).any(-1) & (scales == own_scales)[..., 0] & is_near.all(-1)
    return np.where(is_moved[..., None], found, new)


def check_later_parts(shape: KernelShape, words: Words, first: int, number: int) -> None:
    """Parts that the context has not come to have the tag of the last step, and nothing in them. `number`: of the start."""
    epoch, first_full = (number + 1) * STEPS - 1, shape.cache.full_layers[0]
    published, tag = Published(shape, words, epoch), (epoch * (shape.spec.num_layers + 1) + first_full + 1) & 0xFFFF
    num_used = (first + STEPS - 1) // (16 * shape.cache.batches_of_partition * shape.splits) + 1
    published._tag = tag
    for part in range(num_used, shape.cache.num_partitions):
        for lane in range(shape.num_lanes):
            outputs, log_sums = published.parts(lane, part)
            assert outputs.num_wrong_tags == log_sums.num_wrong_tags == 0
            assert not outputs.values.any()
            assert set(log_sums.values.tolist()) == {-np.inf}


def prepare(
    shape: KernelShape,
    model: Model,
    ids: np.ndarray[tuple[int], np.dtype[np.uint32]],
    folder: Path,
    changed: Callable[[Mapping[str, str]], dict[str, str]] = dict,
) -> None:
    """The program, of sources that `changed` has changed, the weights and the sequence."""
    sources = changed(twin_sources(headers(shape)))
    cache = sources["attend_cache.cuh"]
    assert cache.count(LOADED) == cache.count(STORED) == 2
    merge, row = sources["attend_merge.cuh"], sources["attend_row.cuh"]
    assert merge.count(PUBLISHES) == cache.count(LOADED_SCALES) == row.count(STORED_SCALES) == 1
    cache = cache.replace(LOADED, "load_global(twin::own(from + i * kStride), v)").replace(
        STORED, "(twin::own(to + i * kStride)) ="
    )
    sources["attend_cache.cuh"] = cache.replace(LOADED_SCALES, "load_global(twin::own(scales),")
    sources["attend_row.cuh"] = row.replace(STORED_SCALES, "(twin::own(scales_at(self, rows, rows.fresh_batch))) =")
    sources["attend_merge.cuh"] = merge.replace(PUBLISHES, NOTED + PUBLISHES)
    build_twin("context", sources, folder)
    ids.tofile(folder / "prompt.bin")
    weights = model.weights(shape)
    for name in ("tape", "norms", "final_norm", "embedding"):
        np.ascontiguousarray(getattr(weights, name)).tofile(folder / f"{name}.bin")
    np.ascontiguousarray(weights.rope, np.float32).tofile(folder / "rope.bin")
