"""The value of every code, and the code of every value, against torch, transformers and a search through all codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.integrations.mxfp4 import FP4_VALUES

from kog_dist.model.formats.numbers import NUMBERS, e8m0_values, nibbles


def drawn(largest: float) -> NDArray[np.float32]:
    """Values of all sizes, every value halfway between two codes and its neighbours, both zeros, and the ends."""
    rng = np.random.default_rng(5)
    exact = np.arange(-2 * largest, 2 * largest, largest / 4096, dtype=np.float32)
    sizes = rng.standard_normal(20_000, dtype=np.float32) * np.exp2(rng.integers(-20, 8, 20_000)).astype(np.float32)
    ends = np.array([0.0, -0.0, 1e-45, -1e-45, largest, -largest, 3e38], np.float32)
    values = np.concatenate([exact, sizes, ends])
    return np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, -np.float32(np.inf))])


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(NUMBERS["E4M3"].values, expected, equal_nan=True)
    assert np.array_equal(np.signbit(NUMBERS["E4M3"].values[[0, 128]]), [False, True])
    values = drawn(448.0)
    theirs = torch.from_numpy(values).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(NUMBERS["E4M3"].nearest(values), theirs)


def test_e2m1_is_transformers_and_rounds_to_the_nearest_code() -> None:
    number = NUMBERS["E2M1"]
    assert np.array_equal(number.values, np.array(FP4_VALUES, np.float32))
    assert np.array_equal(np.signbit(number.values), np.signbit(np.array(FP4_VALUES)))
    values = drawn(6.0)
    codes = number.nearest(values)
    distances = np.abs(number.values[None, :8].astype(np.float64) - np.abs(values.astype(np.float64))[:, None])
    best = distances.min(axis=1)
    assert np.array_equal(distances[np.arange(len(values)), codes & 7], best)
    is_tie = (distances == best[:, None]).sum(axis=1) == 2
    assert is_tie.any()
    assert not (codes[is_tie] & 1).any(), "ties go to the even mantissa"
    assert np.array_equal(codes >> 3, np.signbit(values))


def test_int4_is_symmetric_and_ties_go_to_the_even_code() -> None:
    number = NUMBERS["INT4"]
    assert number.values.tolist() == list(range(-8, 8))
    values = np.array([-9.0, -7.5, -7.0, -0.5, -0.0, 0.0, 0.5, 1.5, 2.5, 6.5, 7.49, 7.5, 8.0], np.float32)
    assert number.values[number.nearest(values)].tolist() == [-7, -7, -7, 0, 0, 0, 0, 2, 2, 6, 7, 7, 7]


def test_e8m0_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(e8m0_values(codes.numpy()), expected, equal_nan=True)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_code_but_nan_is_the_nearest_one_of_its_own_value(name: str) -> None:
    number = NUMBERS[name]
    codes = np.arange(len(number.values), dtype=np.uint8)
    codes = codes[~np.isnan(number.values)]
    if name in ("INT4", "INT8"):
        codes = codes[1:]  # -8 or -128, which rounding leaves out
    assert np.array_equal(number.nearest(number.values[codes]), codes)


def test_the_lower_half_of_a_byte_comes_first() -> None:
    assert nibbles(np.array([[0x21, 0x43], [0xFE, 0x0F]], np.uint8)).tolist() == [[1, 2, 3, 4], [14, 15, 15, 0]]
