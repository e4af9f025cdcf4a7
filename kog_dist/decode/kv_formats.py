"""KV caches of less than 16 bit: what keys and values become when they are in a cache. The definition for all engines.

A row is what one KV head has at one position: `head_dim` keys, after norm and rotation, or as many values. A format rounds rows
as they enter (`enter`), and again groups of `group` neighbouring positions as soon as a position behind the group is written
(`settle`). All of it is elementwise IEEE float32 arithmetic and maxima, so bits depend neither on other heads nor on the number
of ranks. docs/kv-cache.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.formats.numbers import NUMBERS

Array = NDArray[Any]
Values = NDArray[np.float32]
_E4M3: Final = NUMBERS["E4M3"]
_NAN_CODE: Final = np.uint8(0x7F)
MOST_CODE: Final = np.float32(_E4M3.largest)  # of FP8
_MOST_INT4: Final = np.float32(15)
INT4_GROUP: Final = 32  # positions
LEAST_SCALE: Final = np.float32(2.0**-14)  # float16's smallest normal number
MOST_SCALE: Final = np.float32(144.0)  # of FP8, the largest one with which all values are in float16's range
_MOST_FLOAT16: Final = np.float32(65504.0)
_DROPPED_BITS: Final = 17  # of the significand of a scale of FP8: 7 stay


class CodedRows(NamedTuple):
    """FP8 rows as a cache holds them: `codes` (..., head_dim) uint8, one of them each, and `scales` (..., 1) float16."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]


class CodedGroup(NamedTuple):
    """Keys or values of a group: `codes` (..., positions, head_dim) from 0 to 15; `lows` and `scales` float16.

    These are (..., 1, head_dim) of keys, one for each channel, and (..., positions, 1) of values, one for each row.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    lows: NDArray[np.float16]


class KvFormat(NamedTuple):
    """Both calls round in place. `enter` takes rows (..., head_dim), `settle` keys and values (..., group, head_dim).

    `group` 0: rows are rounded as they enter, and never again.
    """

    enter: Callable[[Array], None]
    group: int
    settle: Callable[[Array, Array], None]


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
def encode_int4(group: Array, axis: int) -> CodedGroup:
    """Code what stands along an axis together: -2, the positions, for keys; -1, the head's dimensions, for values.

    low = float16(smallest); scale = float16((largest - low) / 15), at least 2**-14; code = the nearest of (value - low) / scale,
    ties to even, from 0 to 15. A NaN makes all that stands with it NaN. `group` has been rounded to float16, or by this before,
    which it does not change again.
    """
    values: Values = group.astype(np.float32, copy=False)
    lows = (np.minimum.reduce(values, axis=axis, keepdims=True) + np.float32(0)).astype(np.float16)  # never -0
    spread = np.maximum.reduce(values, axis=axis, keepdims=True) - lows.astype(np.float32)
    scales = np.maximum(spread / _MOST_INT4, LEAST_SCALE).astype(np.float16)
    steps = np.rint((values - lows.astype(np.float32)) / scales.astype(np.float32))
    codes = np.fmin(np.fmax(steps, np.float32(0)), _MOST_INT4).astype(np.uint8)
    return CodedGroup(codes, scales, lows)


def values_of_int4(group: CodedGroup) -> Values:
    """low + code * scale: the product is exact, the sum rounded to float32."""
    values: Values = group.lows.astype(np.float32) + group.codes.astype(np.float32) * group.scales.astype(np.float32)
    return values


def _enter_int4(rows: Array) -> None:
    rows[...] = np.clip(rows, -_MOST_FLOAT16, _MOST_FLOAT16).astype(np.float16)


def _settle_int4(keys: Array, values: Array) -> None:
    keys[...] = values_of_int4(encode_int4(keys, axis=-2))
    values[...] = values_of_int4(encode_int4(values, axis=-1))


def _nothing_settles(_keys: Array, _values: Array) -> None:
    """A format whose rows stay as they entered."""


KV_FORMATS: Final[Mapping[str, KvFormat]] = {
    "fp8": KvFormat(_enter_fp8, 0, _nothing_settles),
    "int4": KvFormat(_enter_int4, INT4_GROUP, _settle_int4),
}


def group_of(kv_dtype: str) -> int:
    """Positions that a KV cache of this type rounds together; 0: each by itself."""
    return KV_FORMATS[kv_dtype].group if kv_dtype in KV_FORMATS else 0
