"""Rows of KV caches of less than 16 bit: against torch's own types, at the edges, and in the engine against the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kog_dist.bench.kernel.shapes import named_spec
from kog_dist.config import CHOICES, LaunchConfig
from kog_dist.decode.kv_formats import (
    INT4_GROUP,
    KV_FORMATS,
    LEAST_SCALE,
    MOST_SCALE,
    encode_fp8,
    encode_int4,
    values_of_int4,
)
from kog_dist.errors import ConfigError, PlanError
from kog_dist.launch.inspection import dry_run
from kog_dist.launch.prediction import kv_bytes, predictions
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import KvCache, Laneformer
from kog_dist.workers.cuda.kernel_shape import KernelShape
from tests.unit.test_interpreter import BASE, engine, error, logits_of, save, tokens_of

Rows = NDArray[np.float32]
DEMO = Path(__file__).parents[2] / "kog_dist" / "models" / "demo"


def rows(*values: float, dim: int = 64) -> Rows:
    """One row that begins so and goes on with zeros."""
    row = np.zeros((1, dim), np.float32)
    row[0, : len(values)] = values
    return row


def kept(given_rows: Rows, name: str = "fp8") -> Rows:
    """What enters a cache."""
    found = given_rows.copy()
    KV_FORMATS[name].enter(found)
    return found


def drawn(scale_of_rows: float = 1.0) -> Rows:
    """Rows of all sizes."""
    rng = np.random.default_rng(3)
    sizes = np.exp2(rng.uniform(-18, 18, (4096, 1))).astype(np.float32)
    return rng.standard_normal((4096, 64), dtype=np.float32) * sizes * np.float32(scale_of_rows)


# ---- fp8 ----
def torchs_fp8(values: Rows) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes and scales by torch's conversions, one row at a time."""
    codes, scales = [], []
    for row in torch.from_numpy(values):
        mantissa, exponent = torch.frexp(torch.tensor(float(row.abs().max())) / torch.tensor(448.0))
        scale = torch.ldexp((mantissa * 128).round(), exponent - 7).clamp(2.0**-14, 144.0).to(torch.float16)
        codes.append((row * (1 / scale.float())).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
        scales.append(scale.numpy())
    return np.stack(codes), np.stack(scales)[:, None]


def test_fp8_is_torchs() -> None:
    values = np.concatenate([drawn(), drawn(1e6), drawn(1e-6), rows(0.0, -0.0)])
    found = encode_fp8(values)
    codes, scales = torchs_fp8(values)
    assert found.codes.dtype == np.uint8
    assert found.scales.dtype == np.float16
    assert np.array_equal(found.scales, scales)
    assert np.array_equal(found.codes, codes)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy() * scales.astype(np.float64)
    assert np.array_equal(kept(values), exact), "the product of code and scale is exact in float32"


def test_fp8_at_the_edges() -> None:
    scale_of = {name: float(encode_fp8(row).scales[0, 0]) for name, row in {
        "zeros": rows(), "tiny": rows(1e-40, 2.0**-30), "least": rows(448 * 2.0**-14), "one": rows(448.0, 1.0),
        "largest": rows(448 * 144.0), "huge": rows(3e38), "infinite": rows(-np.inf, 1.0), "of a NaN": rows(np.nan, 448.0),
    }.items()}  # fmt: skip
    least, most = float(LEAST_SCALE), float(MOST_SCALE)
    assert scale_of == {
        "zeros": least, "tiny": least, "least": least, "one": 1.0, "largest": most, "huge": most, "infinite": most,
        "of a NaN": 1.0,
    }  # fmt: skip
    assert not kept(rows()).any()
    assert not kept(rows(2.0**-25)).any(), "less than half of the smallest code"
    assert kept(rows(2.0**-23 * 1.4))[0, 0] == 2.0**-23
    assert kept(rows(3e38, -3e38, np.inf))[0, :3].tolist() == [448 * 144.0, -448 * 144.0, 448 * 144.0]
    found = kept(rows(np.nan, 448.0, -1.0))
    assert np.isnan(found[0, 0])
    assert found[0, 1:3].tolist() == [448.0, -1.0], "a NaN spoils only itself"
    assert np.isnan(kept(np.full((1, 64), np.nan, np.float32))).all()


def test_fp8_ties_go_to_the_even_code_and_to_the_even_scale() -> None:
    assert kept(rows(448.0, 17.0, 19.0, 17.01, -17.0, 2.0**-10))[0, :6].tolist() == [448.0, 16.0, 20.0, 18.0, -16.0, 0.0]
    halfway = 448 * (1 + 2.0**-7)  # between two numbers of seven bits
    assert encode_fp8(rows(halfway)).scales[0, 0] == 1.0
    assert encode_fp8(rows(448 * (1 + 3 * 2.0**-7))).scales[0, 0] == 1 + 2.0**-5
    assert kept(rows(halfway))[0, 0] == 448.0, "beyond the last code: saturated"


def test_fp8_rounded_again_is_the_same_through_float16_too() -> None:
    """Prefill on GPUs has keys and values in float16 between chunks, and finds scales and codes again."""
    values = np.clip(drawn(), -60000, 60000)
    once = encode_fp8(values)
    for again in (kept(values), kept(values).astype(np.float16)):
        twice = encode_fp8(again)
        assert np.array_equal(once.scales, twice.scales)
        assert np.array_equal(once.codes & 0x7F, twice.codes & 0x7F)


# ---- int4 ----
def group(*sizes: float) -> Rows:
    """Groups (..., INT4_GROUP, 64) as they enter: one for each size, with an offset in every channel."""
    rng = np.random.default_rng(4)
    drawn_rows = rng.standard_normal((len(sizes), INT4_GROUP, 64), dtype=np.float32)
    offsets = 10 * rng.standard_normal((len(sizes), 1, 64), dtype=np.float32)
    return kept((drawn_rows + offsets) * np.array(sizes, np.float32)[:, None, None], "int4")


def settled(keys: Rows, values: Rows) -> tuple[Rows, Rows]:
    found = keys.copy(), values.copy()
    KV_FORMATS["int4"].settle(*found)
    return found


@pytest.mark.parametrize("axis", [-2, -1])
def test_int4_is_the_definition_value_by_value(axis: int) -> None:
    entered = group(1.0, 300.0, 2.0**-16)
    found = encode_int4(entered, axis)
    shape = (3, 1, 64) if axis == -2 else (3, INT4_GROUP, 1)
    assert found.scales.shape == found.lows.shape == shape
    together = np.moveaxis(entered, axis, -1).reshape(-1, entered.shape[axis])
    codes = np.moveaxis(found.codes, axis, -1).reshape(together.shape)
    for row, low, scale, coded in zip(together, found.lows.ravel(), found.scales.ravel(), codes, strict=True):
        assert low == row.min()
        assert scale == np.float16(max(float(np.float32(row.max() - row.min()) / np.float32(15)), 2.0**-14))
        exact = (row.astype(np.float64) - float(low)) / float(scale)
        assert (np.abs(exact - coded) <= 0.5 + 1e-3).all()
        assert coded.max() <= 15
    assert np.array_equal(values_of_int4(found), found.lows.astype(np.float32) + found.codes * found.scales.astype(np.float32))


def test_int4_rounds_keys_by_channel_and_values_by_row() -> None:
    entered = group(1.0)
    keys, values = settled(entered, entered)
    steps = [len(np.unique(keys[0, :, channel])) for channel in range(64)]
    assert max(steps) <= 16
    assert max(len(np.unique(values[0, row])) for row in range(INT4_GROUP)) <= 16
    spread = entered.max(axis=1, keepdims=True) - entered.min(axis=1, keepdims=True)
    assert (np.abs(keys - entered) <= spread / 30 * 1.01).all()
    assert np.abs(values - entered).max() > np.abs(keys - entered).max(), "channels have offsets, which rows pay for"


@settings(deadline=None, max_examples=300)
@given(
    rows_of_group=arrays(np.float32, (INT4_GROUP, 8), elements=st.floats(-70000, 70000, width=32)),
    exponent=st.integers(-24, 0), offset=st.floats(-60000, 60000, width=32),
)  # fmt: skip
def test_int4_rounded_again_is_the_same(rows_of_group: Rows, exponent: int, offset: float) -> None:
    """A group from a block of a kept prefix may be rounded already."""
    entered = kept(np.float32(offset) + rows_of_group * np.float32(2.0**exponent), "int4")
    once = settled(entered, entered)
    assert [part.tobytes() for part in settled(*once)] == [part.tobytes() for part in once]


def test_int4_at_the_edges() -> None:
    assert kept(rows(1e9, -np.inf, 65519.0, 1 + 2.0**-12), "int4")[0, :4].tolist() == [65504.0, -65504.0, 65504.0, 1.0]
    zeros = np.zeros((INT4_GROUP, 64), np.float32)
    assert not any(part.any() for part in settled(zeros, zeros))
    assert not np.signbit(encode_int4(-zeros, -1).lows).any(), "lows are never -0"
    constant = np.full_like(zeros, -7.25)
    assert all((part == -7.25).all() for part in settled(constant, constant))
    widest = zeros.copy()
    widest[0, 0], widest[1, 0] = -65504, 65504
    assert np.isfinite(settled(widest, widest)).all()
    spoilt = zeros.copy()
    spoilt[3, 5] = np.nan
    keys, values = settled(kept(spoilt, "int4"), kept(spoilt, "int4"))
    assert np.isnan(keys[:, 5]).all()
    assert np.isnan(keys).sum() == INT4_GROUP, "a NaN spoils its channel of the group"
    assert np.isnan(values[3]).all()
    assert np.isnan(values).sum() == 64, "and its row"


def test_int4_ties_go_to_the_even_code() -> None:
    row = rows(15.0, 0.5, 1.5, 2.5, 14.5)
    assert encode_int4(row, -1).codes[0, :6].tolist() == [15, 0, 2, 2, 14, 0]


def test_int4_keeps_the_newest_group_as_it_entered(tmp_path: Path) -> None:
    folder, tokens = save(BASE, tmp_path / "model"), tokens_of(BASE, INT4_GROUP + 2)
    model, raw = engine(folder, kv_dtype="int4"), engine(folder, kv_dtype="float16")
    (keys,), (values,) = model.memory.keys[0], model.memory.values[0]
    entered = [cache[0] for cache in (raw.memory.keys[0], raw.memory.values[0])]
    logits_of(raw, tokens)
    assert logits_of(model, tokens[:INT4_GROUP]).tobytes() == logits_of(engine(folder, kv_dtype="float16"), tokens[:32]).tobytes()
    full = slice(0, INT4_GROUP)
    assert np.array_equal(keys[:, :, full], entered[0][:, :, full]), "full, but nothing is behind it"
    logits_of(model, tokens[INT4_GROUP:], start=INT4_GROUP)
    expected = settled(entered[0][:, :, full], entered[1][:, :, full])
    assert np.array_equal(keys[:, :, full], expected[0])
    assert np.array_equal(values[:, :, full], expected[1])
    assert np.array_equal(keys[:, :, INT4_GROUP], entered[0][:, :, INT4_GROUP])


def test_int4_goes_on_only_where_nothing_is_lost(tmp_path: Path) -> None:
    folder, tokens = save(BASE, tmp_path / "model"), tokens_of(BASE, INT4_GROUP + 4)
    model = engine(folder, kv_dtype="int4")
    first = logits_of(model, tokens)
    again = logits_of(model, tokens[INT4_GROUP + 1 :], start=INT4_GROUP + 1)  # within the newest group
    assert again.tobytes() == first[INT4_GROUP + 1 :].tobytes()
    again = logits_of(model, tokens[INT4_GROUP:], start=INT4_GROUP)
    assert again.tobytes() == first[INT4_GROUP:].tobytes()
    with pytest.raises(PlanError, match="position 31 cannot follow: KV cache 0 has rounded groups of 32 positions up to 32"):
        model.step(tokens[31], 31, None)
    with pytest.raises(PlanError, match="go on at a multiple of 32"):
        model.use_cache(0, 0, 5)
    with pytest.raises(PlanError, match="31 positions were put into a KV cache that keeps groups of 32"):
        model.filled(0, 31)
    model.use_cache(0, 0, 0)
    assert logits_of(model, tokens).tobytes() == first.tobytes()


# ---- all formats ----
@pytest.mark.parametrize("name", KV_FORMATS)
@settings(deadline=None, max_examples=100)
@given(given_rows=arrays(np.float32, (3, 64), elements=st.floats(-(2.0**15), 2.0**15, width=32)))
def test_rows_enter_each_by_itself_and_with_a_bounded_error(name: str, given_rows: Rows) -> None:
    together = kept(given_rows, name)
    assert together.tobytes() == b"".join(kept(given_rows[k : k + 1], name).tobytes() for k in range(3))
    largest = np.abs(given_rows).max(axis=-1, keepdims=True)
    part = {"fp8": 2.0**-4, "int4": 2.0**-11}[name]
    # Of the largest value at most: half a step of its code, and what rounding the scale moves it. Tiny rows: half the least code.
    assert (np.abs(together - given_rows) <= part * largest * 1.01 + 2.0**-24).all()
    assert kept(-given_rows, name).tobytes() == (-together).tobytes()


def test_caches_hold_what_the_definition_keeps(tmp_path: Path) -> None:
    folder, tokens = save(BASE, tmp_path / "model"), tokens_of(BASE, 1)
    model, plain = engine(folder, kv_dtype="fp8"), engine(folder)
    logits_of(model, tokens)
    logits_of(plain, tokens)
    pairs = zip((model.memory.keys[0], model.memory.values[0]), (plain.memory.keys[0], plain.memory.values[0]), strict=True)
    for (cache,), (unrounded,) in pairs:
        assert cache.any()
        assert np.array_equal(cache[:, :, 0], kept(unrounded[:, :, 0])), "the first layer is before all that is rounded"


@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_engine_is_the_oracle(name: str, tmp_path: Path) -> None:
    spec = replace(BASE, max_context=96)
    folder, tokens = save(spec, tmp_path / "model"), tokens_of(spec, 80)
    oracle = Laneformer.from_checkpoint(folder, torch.float64)
    with torch.no_grad():
        exact = oracle(torch.tensor([tokens]))[0].numpy()
        oracle.round_keys_and_values(name)
        rounded = oracle(torch.tensor([tokens]))[0].numpy()
        cache = KvCache()
        pieces = [oracle(torch.tensor([tokens[at : at + 24]]), cache)[0].numpy() for at in range(0, 80, 24)]
    assert error(np.concatenate(pieces), rounded) < 1e-6
    found = logits_of(engine(folder, kv_dtype=name), tokens)
    # A value next to a rounding boundary may fall on the other side in float32, and then moves those after it.
    assert error(found, rounded) < error(exact, rounded) / 3


# ---- settings ----
def test_formats_are_settings_and_gpus_refuse_by_name_what_they_cannot_do() -> None:
    assert set(KV_FORMATS) < set(CHOICES["kv_dtype"])
    laneformer, dense = open_checkpoint(DEMO).spec, named_spec("qwen3-0.6b")
    of_48 = replace(dense, own_head_dim=48)
    for spec, name, reason in (
        (laneformer, "fp8", "fp8 KV cache of a Laneformer"), (of_48, "fp8", "of heads of 48 values"), (dense, "int4", "int4 KV"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{reason} .*; use --device cpu"):
            KernelShape(spec, range(spec.num_lanes), kv_dtype=name)
    plain, coded = (KernelShape(dense, range(dense.num_lanes), kv_dtype=name) for name in ("float16", "fp8"))
    assert coded.kv_bytes == plain.kv_bytes * (128 + 2) // 256, "codes of a row, and its scale"


def test_predictions_for_gpus_are_of_the_format_that_is_asked_for() -> None:
    spec = named_spec("qwen3-0.6b")
    plain = kv_bytes(spec, 1000)
    assert plain == 1000 * spec.num_layers * spec.num_kv_heads * 2 * 128 * 2
    assert kv_bytes(spec, 1000, "fp8") == plain * (128 + 2) // 256
    assert kv_bytes(spec, 1000, "int4") == plain, "which GPUs do not have"
    assert predictions(spec, 10**9, 10**9, "fp8") != predictions(spec, 10**9, 10**9)


def test_a_dry_run_says_what_the_cache_takes_on_cpu_ranks() -> None:
    def told(name: str) -> str:
        return dry_run(LaunchConfig(device="cpu", ranks=1, kv_dtype=name))

    plain, coded = told("auto"), told("fp8")
    (size,) = (line.split(" KV cache")[0].split("at most ")[1] for line in plain.splitlines() if "KV cache" in line)
    assert f"at most {size} KV cache (fp8 values kept in float32)" in coded
