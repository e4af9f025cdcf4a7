"""KV caches of less than 16 bit: what a row of keys or values becomes when it enters a cache. The definition for all engines.

A row is what one KV head has at one position: `head_dim` keys, after norm and rotation, or as many values. It is rounded by
itself, with elementwise IEEE float32 arithmetic and maxima alone, so its bits depend neither on other rows nor on the number of
ranks. docs/kv-cache.md says the same in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.model.formats.numbers import NUMBERS

Array = NDArray[Any]
_E4M3: Final = NUMBERS["E4M3"]
_NAN_CODE: Final = np.uint8(0x7F)
_LARGEST: Final = np.float32(_E4M3.largest)
LEAST_SCALE: Final = np.float32(2.0**-14)  # float16's smallest normal number
MOST_SCALE: Final = np.float32(65504.0)  # and its largest


class CodedRows(NamedTuple):
    """Rows as a cache holds them: `codes` (..., head_dim) uint8, one of them each, and `scales` (..., 1) float16."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]


class KvFormat(NamedTuple):
    """A format of rows (..., head_dim). `bits`: of a code. `values` gives float32."""

    bits: int
    encode: Callable[[Array], CodedRows]
    values: Callable[[CodedRows], NDArray[np.float32]]


def _encode_fp8(rows: Array) -> CodedRows:
    """scale = float16(largest magnitude / 448), from 2**-14 to 65504; code = the nearest E4M3 of value / scale, ties to even.

    Values beyond 448 scales get +-448, infinities too. A NaN stays one, and does not count for the scale.
    """
    values: NDArray[np.float32] = rows.astype(np.float32, copy=False)
    largest = np.fmax.reduce(np.abs(values), axis=-1, keepdims=True)
    ideal = np.fmin(np.fmax(largest / _LARGEST, LEAST_SCALE), MOST_SCALE)
    scales = ideal.astype(np.float16)
    with np.errstate(invalid="ignore"):  # of a NaN, whose code is put right below
        codes = _E4M3.nearest(np.divide(values, scales, dtype=np.float32))
    codes[np.isnan(values)] = _NAN_CODE
    return CodedRows(codes, scales)


def _values_fp8(rows: CodedRows) -> NDArray[np.float32]:
    """code * scale: exact."""
    values: NDArray[np.float32] = _E4M3.values[rows.codes] * rows.scales.astype(np.float32)
    return values


KV_FORMATS: Final[Mapping[str, KvFormat]] = {"fp8": KvFormat(8, _encode_fp8, _values_fp8)}


def round_rows(rows: Array, name: str) -> None:
    """Put what a cache of format `name` keeps of them in the place of rows (..., head_dim)."""
    form = KV_FORMATS[name]
    rows[...] = form.values(form.encode(rows))
