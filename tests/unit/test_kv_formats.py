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

from kog_dist.bench.shapes import named_spec
from kog_dist.config import CHOICES, LaunchConfig
from kog_dist.decode.kv_formats import (
    INT4_KEY_LEVELS,
    INT4_VALUE_LEVELS,
    KV_FORMATS,
    LEAST_SCALE,
    MOST_SCALE,
    encode_fp8,
    encode_int4,
    rotation_factors,
    values_of_int4,
)
from kog_dist.errors import ConfigError
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
    KV_FORMATS[name].enter_keys(found)
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
def hadamard(size: int) -> NDArray[np.float64]:
    """Of Sylvester's construction."""
    ones = np.array([[bin(row & column).count("1") % 2 for column in range(size)] for row in range(size)])
    return 1.0 - 2.0 * ones


@pytest.mark.parametrize("levels", [INT4_KEY_LEVELS, INT4_VALUE_LEVELS])
@pytest.mark.parametrize(("dim", "size"), [(128, 128), (64, 64), (48, 16)])
def test_int4_is_the_definition_value_by_value(levels: int, dim: int, size: int) -> None:
    values = drawn()[:64].repeat(2, axis=-1)[:, :dim] * np.arange(1, dim + 1, dtype=np.float32)
    values = (
        values / np.abs(values).max(axis=-1, keepdims=True) * np.exp2(np.arange(-12, 12).repeat(3)[:64, None]).astype(np.float32)
    )
    found = encode_int4(values, levels)
    way_in, way_back = rotation_factors(dim)
    assert way_in * way_back * size == 1
    turned = (values.reshape(-1, dim // size, size).astype(np.float64) @ hadamard(size) * way_in).reshape(values.shape)
    scales = found.scales.astype(np.float64)
    assert np.allclose(scales, np.maximum(np.abs(turned).max(axis=-1, keepdims=True) / (levels - 1), 2.0**-14), rtol=2.0**-7)
    assert np.array_equal(scales.astype(np.float32).view(np.uint32) & 0x1FFFF, np.zeros_like(scales)), "seven significant bits"
    steps = turned / scales
    assert found.codes.max() == levels - 1
    inside = np.abs(steps) <= levels - 1
    assert (np.abs(2.0 * found.codes - (levels - 1) - steps)[inside] <= 1 + 1e-3).all(), "the nearest of the odd multiples"
    exact = ((2.0 * found.codes - (levels - 1)) * scales).reshape(-1, dim // size, size) @ hadamard(size) * way_back
    assert np.allclose(values_of_int4(found, levels), exact.reshape(values.shape), rtol=1e-5, atol=1e-5 * float(scales.max()))


def test_int4_rounded_again_is_the_same_through_float16_too() -> None:
    """Prefill on GPUs has keys and values in float16 between chunks, and finds scales and codes again."""
    sizes = np.exp2(np.arange(-6, 12).repeat(100)[:, None]).astype(np.float32)
    for dim in (64, 128):
        values = np.random.default_rng(5).standard_normal((len(sizes), dim), dtype=np.float32) * sizes
        for levels in (INT4_KEY_LEVELS, INT4_VALUE_LEVELS):
            once = encode_int4(values, levels)
            twice = encode_int4(values_of_int4(once, levels).astype(np.float16), levels)
            assert np.array_equal(once.scales, twice.scales)
            assert np.array_equal(once.codes, twice.codes)


def test_int4_at_the_edges() -> None:
    least = 2.0**-14
    for levels in (INT4_KEY_LEVELS, INT4_VALUE_LEVELS):
        assert float(encode_int4(rows(), levels).scales[0, 0]) == least
        assert np.abs(values_of_int4(encode_int4(rows(), levels), levels)).max() <= 64 * least / 8, "no code stands for zero"
        assert float(encode_int4(rows(3e38), levels).scales[0, 0]) == 4096
        assert np.isfinite(values_of_int4(encode_int4(rows(3e38), levels), levels)).all()
        for spoilt in (np.nan, np.inf, -np.inf):
            found = values_of_int4(encode_int4(np.concatenate([rows(spoilt), rows(1.0)]), levels), levels)
            assert np.isnan(found[0]).all(), "its row, which is rotated"
            assert np.isfinite(found[1]).all()


def test_int4_keeps_more_of_keys_than_of_values() -> None:
    entered = np.random.default_rng(6).standard_normal((512, 128), dtype=np.float32)
    keys, values = entered.copy(), entered.copy()
    KV_FORMATS["int4"].enter_keys(keys)
    KV_FORMATS["int4"].enter_values(values)
    errors = [float(np.linalg.norm(kept_rows - entered) / np.linalg.norm(entered)) for kept_rows in (keys, values)]
    assert 0.02 < errors[0] < 0.03
    assert 4 < errors[1] / errors[0] < 4.4, "two bits"


# ---- all formats ----
@pytest.mark.parametrize("name", KV_FORMATS)
@settings(deadline=None, max_examples=100)
@given(given_rows=arrays(np.float32, (3, 64), elements=st.floats(-(2.0**15), 2.0**15, width=32)))
def test_rows_enter_each_by_itself_and_with_a_bounded_error(name: str, given_rows: Rows) -> None:
    together = kept(given_rows, name)
    assert together.tobytes() == b"".join(kept(given_rows[k : k + 1], name).tobytes() for k in range(3))
    if name == "fp8":
        # Of the largest value at most: half a step of its code, and what rounding the scale moves it. Tiny: half the least code.
        bound = 2.0**-4 * np.abs(given_rows).max(axis=-1, keepdims=True) * 1.01 + 2.0**-24
    else:  # rotated, each value is at most a scale away; the largest one is at most the row's length
        bound = np.linalg.norm(given_rows.astype(np.float64), axis=-1, keepdims=True) * 8 / 63 * 1.02 + 8 * 2.0**-14
    assert (np.abs(together - given_rows) <= bound).all()


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
        (laneformer, "fp8", "fp8 KV cache of a Laneformer"), (of_48, "fp8", "of heads of 48 values"),
        (laneformer, "int4", "int4 KV cache of a Laneformer"), (replace(dense, own_head_dim=32), "int4", "of heads of 32 values"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{reason} .*; use another --kv-dtype, or --device cpu"):
            KernelShape(spec, range(spec.num_lanes), kv_dtype=name)
    with pytest.raises(ConfigError, match=r"it has head_dim 40 .* KV cache of heads of 40 values .*; use --device cpu"):
        KernelShape(replace(dense, own_head_dim=40), range(dense.num_lanes), kv_dtype="int4")
    plain, fp8, int4 = (KernelShape(dense, range(dense.num_lanes), kv_dtype=name) for name in ("float16", "fp8", "int4"))
    assert fp8.cache.num_bytes == plain.cache.num_bytes * (128 + 2) // 256, "codes of a row, and its scale"
    assert int4.cache.num_bytes == plain.cache.num_bytes * (128 * (6 + 4) // 8 + 4) // 512, (
        "codes of keys and of values, and both scales"
    )


def test_predictions_for_gpus_are_of_the_format_that_is_asked_for() -> None:
    spec = named_spec("qwen3-0.6b")
    plain = kv_bytes(spec, 1000)
    assert plain == 1000 * spec.num_layers * spec.num_kv_heads * 2 * 128 * 2
    assert kv_bytes(spec, 1000, "fp8") == plain * (128 + 2) // 256
    assert kv_bytes(spec, 1000, "int4") == plain * (128 * (6 + 4) // 8 + 4) // 512
    assert predictions(spec, 10**9, 10**9, "fp8") != predictions(spec, 10**9, 10**9)


def test_a_dry_run_says_what_the_cache_takes_on_cpu_ranks() -> None:
    def told(name: str) -> str:
        return dry_run(LaunchConfig(device="cpu", ranks=1, kv_dtype=name))

    plain, coded = told("auto"), told("fp8")
    (size,) = (line.split(" KV cache")[0].split("at most ")[1] for line in plain.splitlines() if "KV cache" in line)
    assert f"at most {size} KV cache (fp8 values kept in float32)" in coded
