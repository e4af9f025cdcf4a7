"""KV caches of less than 16 bit: what keys and values become when they are in a cache. The definition for all engines.

A row is what one KV head has at one position: `head_dim` keys, after norm and rotary embedding, or as many values. Formats round
each row by itself as it enters. All of it is elementwise IEEE float32 arithmetic and maxima, so bits depend neither on other
rows nor on the number of ranks. docs/kv-cache.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.late_numpy import Array
from kog_dist.model.formats.numbers import NUMBERS

Values = NDArray[np.float32]
_E4M3: Final = NUMBERS["E4M3"]
_NAN_CODE: Final = np.uint8(0x7F)
MOST_CODE: Final = np.float32(_E4M3.largest)  # of FP8
LEAST_SCALE: Final = np.float32(2.0**-14)  # float16's smallest normal number
MOST_SCALE: Final = np.float32(144.0)  # of FP8, the largest one with which all values are in float16's range
INT4_KEY_LEVELS: Final = 64
INT4_VALUE_LEVELS: Final = 16
INT4_MOST_SCALE: Final = np.float32(4096.0)  # rows beyond have no place in float16
_DROPPED_BITS: Final = 17  # of the significand of a scale: 7 stay


class CodedRows(NamedTuple):
    """Rows as a cache holds them: `codes` (..., head_dim) uint8, one for each value, and `scales` (..., 1) float16."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]


class KvFormat(NamedTuple):
    """Both calls round rows (..., head_dim) in place."""

    enter_keys: Callable[[Array], None]
    enter_values: Callable[[Array], None]


# ---- fp8 ----
def encode_fp8(rows: Array) -> CodedRows:
    """scale = largest magnitude / 448 in 7 significant bits, from 2**-14 to 144; code = the nearest E4M3 to value * (1 / scale).

    Ties to even. A code has 4 significant bits, so what is kept is exact in float16, and the largest magnitude has the largest
    code: rounding a kept row changes nothing. Values beyond 448 scales get +-448, infinities too. A NaN stays one, and does not
    count for the scale.
    """
    values: Values = rows.astype(np.float32, copy=False)
    largest = np.fmax.reduce(np.abs(values), axis=-1, keepdims=True)
    ideal: Values = np.divide(largest, MOST_CODE, dtype=np.float32)
    scales = np.fmin(np.fmax(_with_seven_bits(ideal), LEAST_SCALE), MOST_SCALE)
    with np.errstate(invalid="ignore"):  # of a NaN, whose code is put right below
        codes = _E4M3.nearest(values * np.divide(np.float32(1), scales, dtype=np.float32))
    codes[np.isnan(values)] = _NAN_CODE
    return CodedRows(codes, scales.astype(np.float16))


def _with_seven_bits(values: Values) -> Values:
    """Positive values, to nearest, ties to even."""
    bits = values.view(np.uint32)
    half, even = np.uint32((1 << _DROPPED_BITS - 1) - 1), bits >> np.uint32(_DROPPED_BITS) & np.uint32(1)
    kept = (bits + half + even) & np.uint32(0xFFFFFFFF << _DROPPED_BITS & 0xFFFFFFFF)
    rounded: Values = kept.view(np.float32)
    return rounded


def values_of_fp8(rows: CodedRows) -> Values:
    """code * scale: exact."""
    values: Values = _E4M3.values[rows.codes] * rows.scales.astype(np.float32)
    return values


def _enter_fp8(rows: Array) -> None:
    rows[...] = values_of_fp8(encode_fp8(rows))


# ---- int4 ----
def _rotated(values: Values, factor: float) -> Values:
    """Times the Hadamard matrix of the largest power of two that divides head_dim, piece by piece, and times the factor."""
    size, width = _rotated_size(values.shape[-1]), 1
    while width < size:
        pairs = values.reshape(*values.shape[:-1], values.shape[-1] // (2 * width), 2, width)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        values = np.stack((first + second, first - second), axis=-2).reshape(values.shape)
        width *= 2
    return values * np.float32(factor)


def _rotated_size(head_dim: int) -> int:
    return head_dim & -head_dim


def rotation_factors(head_dim: int) -> tuple[float, float]:
    """Powers of two on the way in and on the way back: about 1 / sqrt(size) each, together 1 / size."""
    exponent = _rotated_size(head_dim).bit_length() - 1
    return 2.0 ** -(exponent // 2), 2.0 ** -(exponent - exponent // 2)


def encode_int4(rows: Array, levels: int) -> CodedRows:
    """Rotate; scale = largest magnitude / (levels - 1) in 7 significant bits; code = the nearest of 0 to levels - 1.

    Code c stands for 2 c - (levels - 1) scales. Ties go to the even code. A row with a NaN or an infinity gets the scale NaN.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        values = _rotated(rows.astype(np.float32, copy=False), rotation_factors(rows.shape[-1])[0])
        largest = np.maximum.reduce(np.abs(values), axis=-1, keepdims=True)
        ideal: Values = np.divide(largest, np.float32(levels - 1), dtype=np.float32)
        scales = np.minimum(np.maximum(_with_seven_bits(ideal), LEAST_SCALE), INT4_MOST_SCALE)
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
        steps = np.rint(values * np.divide(np.float32(0.5), scales, dtype=np.float32) + np.float32((levels - 1) / 2))
    codes = np.fmin(np.fmax(steps, np.float32(0)), np.float32(levels - 1)).astype(np.uint8)
    return CodedRows(codes, scales.astype(np.float16))


def values_of_int4(rows: CodedRows, levels: int) -> Values:
    """Odd multiples of the scale, rotated back."""
    steps = 2 * rows.codes.astype(np.float32) - np.float32(levels - 1)
    return _rotated(steps * rows.scales.astype(np.float32), rotation_factors(rows.codes.shape[-1])[1])


def _enter_int4(rows: Array, levels: int) -> None:
    rows[...] = values_of_int4(encode_int4(rows, levels), levels)


KV_FORMATS: Final[Mapping[str, KvFormat]] = {
    "fp8": KvFormat(_enter_fp8, _enter_fp8),
    "int4": KvFormat(partial(_enter_int4, levels=INT4_KEY_LEVELS), partial(_enter_int4, levels=INT4_VALUE_LEVELS)),
}
