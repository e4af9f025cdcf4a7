"""The LM head in FP8 (`--quantize-head fp8`): E4M3 with one scale for each row, a power of two.

So every value is exact in bfloat16, which CPU ranks keep; GPUs keep codes. It is rounded from the head's own values, or from
those of the embedding where both are one tensor; the embedding itself stays as it is.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from kog_dist.model.formats.numbers import E4M3, NUMBERS
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.spec import HeadType, ModelSpec

AnyArray = Any  # numpy.ndarray or cupy.ndarray
_LEAST_EXPONENT: Final = -100  # of a scale, so that no value is a subnormal number
_BIAS, _MANTISSA_BITS = 127, 23  # of float32
_LARGEST_BITS: Final = int(np.float32(E4M3.largest).view(np.uint32))
_CHUNK: Final = 1 << 16  # values that are rounded at a time: they and what is made of them stay in a core's cache


class CodedHead(NamedTuple):
    """Rows of the LM head: the value of element (r, k) is that of its code times scales[r]."""

    codes: AnyArray  # (rows, columns), uint8
    scales: AnyArray  # (rows, 1), float32


def head_format(choice: str, spec: ModelSpec) -> WeightFormat | None:
    """What a word of the setting `quantize_head` means; None: as it is. With `lane` a row has a scale for each lane's columns."""
    columns = spec.hidden_size if spec.head_type is HeadType.LANE else 0
    return None if choice == "none" else WeightFormat("E4M3", 1, columns, "E8M0")


def rounded_rows(values: AnyArray) -> CodedHead:
    """Rows (rows, columns) of finite float32 values; numpy arrays or cupy's, with the same bits.

    scale = the least power of two with which no magnitude of the row is beyond 448, at least 2^-100. code = the nearest of
    value / scale, ties to even.
    """
    largest = abs(values).max(axis=1).view(np.uint32)
    mantissa = (1 << _MANTISSA_BITS) - 1
    exceeds = (largest & np.uint32(mantissa)) > np.uint32(_LARGEST_BITS & mantissa)
    exponents = (largest >> np.uint32(_MANTISSA_BITS)).astype(np.int32) - (_LARGEST_BITS >> _MANTISSA_BITS) + exceeds
    exponents = exponents.clip(_LEAST_EXPONENT, None)
    codes = np.empty_like(values, dtype=np.uint8)
    E4M3.write_nearest(values * _powers(-exponents), codes)
    return CodedHead(codes, _powers(exponents))


def _powers(exponents: AnyArray) -> AnyArray:
    """2 ** exponents, (rows, 1)."""
    return ((exponents + _BIAS) << _MANTISSA_BITS).astype(np.uint32).view(np.float32)[:, None]


def round_in_place(rows: AnyArray, columns: int) -> None:
    """Give float32 rows (rows, K) the values of their codes, each of so many columns with a scale of its own; 0: all of them."""
    width = columns or rows.shape[1]
    parts = rows.reshape(-1, width)
    step = max(_CHUNK // width, 1)
    for first in range(0, len(parts), step):
        part = parts[first : first + step]
        coded = rounded_rows(part)
        np.multiply(NUMBERS["E4M3"].values[coded.codes], coded.scales, out=part)
