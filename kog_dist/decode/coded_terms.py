"""Rows of 16-bit values among those of a quantised matrix: each is the sum of some rows of codes, which take as many bits.

So what files keep in 16 bit beside codes goes through the same products, and who sums a row adds its terms. E4M3 has two: the
nearest code, and that of what it leaves. A bfloat16 number has 8 significant bits, of which each term has 4: their sum is exact
from the largest value of a group down to 2^-14 of it, and below that within 2^-21 of it. Integers are the digits of a whole
number, the highest first: their sum is within 2^-14 of the largest value, from which rounding to bfloat16 took up to 2^-9.
Scales are powers of two.

The functions take numpy or cupy arrays and return the same kind.
"""

from __future__ import annotations

import numpy as np

from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.tape_packing import AnyArray
from kog_dist.model.formats.numbers import E4M3

TERMED = ("E4M3", "INT8", "INT4")
_LEAST_SCALE = 2.0**-24  # the smallest one of 16 bits


def as_terms(values: AnyArray, coding: Coding) -> Codes:
    """The `coding.terms` rows of codes of each row of float32 `values` (rows, columns), one below the other."""
    rows, columns = values.shape
    width = CODED_COLUMNS // coding.scales if coding.scales else columns
    num_groups = -(-columns // width)
    groups = np.zeros_like(values, shape=(rows, num_groups * width))
    groups[:, :columns] = values
    split = _floats if coding.number == "E4M3" else _integers
    codes, scales = split(groups.reshape(rows, num_groups, width), coding)
    codes = codes.reshape(rows * coding.terms, -1)[:, :columns]
    scales = scales.reshape(rows * coding.terms, num_groups)
    zeros = np.full_like(scales, 1 << coding.bits - 1, dtype=np.uint8) if coding.has_zeros else None
    return Codes(codes, scales, zeros)


def _floats(values: AnyArray, coding: Coding) -> tuple[AnyArray, AnyArray]:
    """Codes (rows, terms, groups, width) and scales (rows, terms, groups) of values (rows, groups, width)."""
    all_codes, all_scales = list[AnyArray](), list[AnyArray]()
    left = values
    for _ in range(coding.terms):
        scales = _scales(left, E4M3.largest, _LEAST_SCALE)
        codes = np.zeros_like(left, dtype=np.uint8)
        E4M3.write_nearest(left / scales, codes)
        left = left - _e4m3_values(codes) * scales
        all_codes.append(codes)
        all_scales.append(scales[..., 0])
    return np.stack(all_codes, axis=1), np.stack(all_scales, axis=1)


def _e4m3_values(codes: AnyArray) -> AnyArray:
    """Float32 values of codes that are no NaN: their bits have the places of those of binary16, whose bias is 8 more."""
    bits = codes.astype(np.uint16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)


def _integers(values: AnyArray, coding: Coding) -> tuple[AnyArray, AnyArray]:
    """The same in digits from -zero to zero - 1, which all but the first have in full."""
    base, zero = 1 << coding.bits, 1 << coding.bits - 1
    least = _LEAST_SCALE * base ** (coding.terms - 1)
    first_scales = _scales(values, zero - 1 + (zero - 2) / base, least)
    number = np.rint(values / (first_scales / base ** (coding.terms - 1))).astype(np.int32)
    all_codes, all_scales = list[AnyArray](), list[AnyArray]()
    for place in reversed(range(coding.terms)):
        codes = (number + zero) % base
        number = (number + zero - codes) // base
        all_codes.insert(0, codes.astype(np.uint8))
        all_scales.insert(0, first_scales[..., 0] / base**place)
    return np.stack(all_codes, axis=1), np.stack(all_scales, axis=1)


def _scales(values: AnyArray, largest: float, least: float) -> AnyArray:
    """The least powers of two (rows, groups, 1), float32, times which `largest` is no less than any value of the group."""
    most = np.maximum(np.abs(values).max(axis=-1, keepdims=True), np.float32(largest * least))
    return np.exp2(np.ceil(np.log2(most / np.float32(largest)))).astype(np.float32)
