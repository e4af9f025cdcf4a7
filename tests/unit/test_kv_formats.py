"""Rows of KV caches of less than 16 bit: against torch's own types, at the edges, and in the engine against the oracle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from kog_dist.config import CHOICES, LaunchConfig
from kog_dist.decode.kv_formats import KV_FORMATS, LEAST_SCALE, MOST_SCALE, round_rows
from kog_dist.errors import ConfigError
from kog_dist.launch.inspection import dry_run
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
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
    found = given_rows.copy()
    round_rows(found, name)
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
        ideal = torch.tensor(float(row.abs().max())) / torch.tensor(448.0)
        scale = torch.clamp(ideal, 2.0**-14, 65504.0).to(torch.float16)
        codes.append((row / scale.float()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy())
        scales.append(scale.numpy())
    return np.stack(codes), np.stack(scales)[:, None]


def test_fp8_is_torchs() -> None:
    values = np.concatenate([drawn(), drawn(1e6), drawn(1e-6), rows(0.0, -0.0)])
    found = KV_FORMATS["fp8"].encode(values)
    codes, scales = torchs_fp8(values)
    assert found.codes.dtype == np.uint8
    assert found.scales.dtype == np.float16
    assert np.array_equal(found.scales, scales)
    assert np.array_equal(found.codes, codes)
    exact = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy() * scales.astype(np.float64)
    assert np.array_equal(kept(values), exact), "the product of code and scale is exact in float32"


def test_fp8_at_the_edges() -> None:
    scale_of = {name: float(KV_FORMATS["fp8"].encode(row).scales[0, 0]) for name, row in {
        "zeros": rows(), "tiny": rows(1e-40, 2.0**-30), "least": rows(448 * 2.0**-14), "one": rows(448.0, 1.0),
        "largest": rows(448 * 65504.0), "huge": rows(3e38), "infinite": rows(-np.inf, 1.0), "of a NaN": rows(np.nan, 448.0),
    }.items()}  # fmt: skip
    least, most = float(LEAST_SCALE), float(MOST_SCALE)
    assert scale_of == {
        "zeros": least, "tiny": least, "least": least, "one": 1.0, "largest": most, "huge": most, "infinite": most,
        "of a NaN": 1.0,
    }  # fmt: skip
    assert not kept(rows()).any()
    assert not kept(rows(2.0**-25)).any(), "less than half of the smallest code"
    assert kept(rows(2.0**-23 * 1.4))[0, 0] == 2.0**-23
    assert kept(rows(3e38, -3e38, np.inf))[0, :3].tolist() == [448 * 65504.0, -448 * 65504.0, 448 * 65504.0]
    found = kept(rows(np.nan, 448.0, -1.0))
    assert np.isnan(found[0, 0])
    assert found[0, 1:3].tolist() == [448.0, -1.0], "a NaN spoils only itself"
    assert np.isnan(kept(np.full((1, 64), np.nan, np.float32))).all()


def test_fp8_ties_go_to_the_even_code_and_to_the_even_scale() -> None:
    assert kept(rows(448.0, 17.0, 19.0, 17.01, -17.0, 2.0**-10))[0, :6].tolist() == [448.0, 16.0, 20.0, 18.0, -16.0, 0.0]
    halfway = 448 * (1 + 2.0**-11)  # between two numbers of float16
    assert KV_FORMATS["fp8"].encode(rows(halfway)).scales[0, 0] == 1.0
    assert KV_FORMATS["fp8"].encode(rows(448 * (1 + 3 * 2.0**-11))).scales[0, 0] == np.float16(1 + 2.0**-9)
    assert kept(rows(halfway))[0, 0] == 448.0, "beyond the last code: saturated"


# ---- all formats ----
values_of_rows = arrays(np.float32, (3, 64), elements=st.floats(-(2.0**24), 2.0**24, width=32))


@pytest.mark.parametrize("name", KV_FORMATS)
@settings(deadline=None, max_examples=200)
@given(given_rows=values_of_rows)
def test_rows_are_rounded_each_by_itself_and_with_a_bounded_error(name: str, given_rows: Rows) -> None:
    together = kept(given_rows, name)
    assert together.tobytes() == b"".join(kept(given_rows[k : k + 1], name).tobytes() for k in range(3))
    largest = np.abs(given_rows).max(axis=-1, keepdims=True)
    part = {"fp8": 2.0**-4}[name]
    # Of the largest value at most: half a step of its code, and what rounding the scale moves it. Tiny rows: half the least code.
    assert (np.abs(together - given_rows) <= part * largest * 1.01 + 2.0**-24).all()
    assert kept(-given_rows, name).tobytes() == (-together).tobytes()


@pytest.mark.parametrize("name", KV_FORMATS)
def test_caches_hold_what_the_definition_keeps(name: str, tmp_path: Path) -> None:
    folder, tokens = save(BASE, tmp_path / "model"), tokens_of(BASE, 12)
    model, plain = engine(folder, kv_dtype=name), engine(folder)
    logits_of(model, tokens[:1])
    logits_of(plain, tokens[:1])
    for (cache,), (unrounded,) in zip(
        (model.memory.keys[0], model.memory.values[0]), (plain.memory.keys[0], plain.memory.values[0]), strict=True
    ):
        assert cache.any()
        assert np.array_equal(cache[:, :, 0], kept(unrounded[:, :, 0], name)), "the first layer is before all that is rounded"


@pytest.mark.parametrize("name", KV_FORMATS)
def test_the_engine_is_the_oracle(name: str, tmp_path: Path) -> None:
    folder, tokens = save(BASE, tmp_path / "model"), tokens_of(BASE, 16)
    oracle = Laneformer.from_checkpoint(folder, torch.float64)
    with torch.no_grad():
        exact = oracle(torch.tensor([tokens]))[0].numpy()
        oracle.round_keys_and_values(name)
        rounded = oracle(torch.tensor([tokens]))[0].numpy()
    found = logits_of(engine(folder, kv_dtype=name), tokens)
    # A value next to a rounding boundary may fall on the other side in float32, and then moves those after it.
    assert error(found, rounded) < error(exact, rounded) / 3


# ---- settings ----
def test_formats_are_settings_and_gpus_refuse_them_by_name() -> None:
    assert set(KV_FORMATS) < set(CHOICES["kv_dtype"])
    spec = open_checkpoint(DEMO).spec
    for name in KV_FORMATS:
        with pytest.raises(ConfigError, match=f"{name} KV cache .*; use --device cpu"):
            KernelShape(spec, range(spec.num_lanes), kv_dtype=name)


def test_a_dry_run_says_what_the_cache_takes_on_cpu_ranks() -> None:
    def told(name: str) -> str:
        return dry_run(LaunchConfig(device="cpu", ranks=1, kv_dtype=name))

    plain, coded = told("auto"), told("fp8")
    (size,) = (line.split(" KV cache")[0].split("at most ")[1] for line in plain.splitlines() if "KV cache" in line)
    assert f"at most {size} KV cache (fp8 values kept in float32)" in coded
