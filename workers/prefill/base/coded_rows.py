"""The rows of a KV cache in codes (phases/attend_cache.cuh, kv_codes.cuh): for those who fill or read it from outside.

A batch of FP8 is 16 rows of codes of K; 8 pairs of rows of V: for every dimension the code of the even position and that of the
odd one; and for each position the scales of its rows of K and V.

INT4 the same with four bits of each code: a 32-bit word has eight neighbouring dimensions of K, the even ones in its lower half,
or four of a pair of V, the even position in its lower half. Between K and V stand the upper two bits of each code of K, sixteen
dimensions to a word, again the even ones in the lower half: dimension d has bit
(d & 1) * 16 + (d >> 2 & 1) * 8 + (d >> 3 & 1) * 4 + (d >> 1 & 1) * 2 and the next one, so that each byte has those of four
registers' bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.kv_formats import (
    INT4_KEY_LEVELS,
    INT4_VALUE_LEVELS,
    KV_FORMATS,
    CodedRows,
    Values,
    encode_fp8,
    encode_int4,
    values_of_fp8,
    values_of_int4,
)
from kog_dist.workers.prefill.base.arrays import Array

Places = tuple[Array, Array, Array]  # of positions: split, batch, row
Codes = NDArray[np.uint8]
_PLACES = np.array([[0], [2], [4], [6]], np.uint8)  # of upper bits in a byte
_ENCODE: dict[str, tuple[Callable[[Any], CodedRows], ...]] = {
    "fp8": (encode_fp8, encode_fp8),
    "int4": (partial(encode_int4, levels=INT4_KEY_LEVELS), partial(encode_int4, levels=INT4_VALUE_LEVELS)),
}
_DECODE: dict[str, tuple[Callable[[CodedRows], Values], ...]] = {
    "fp8": (values_of_fp8, values_of_fp8),
    "int4": (partial(values_of_int4, levels=INT4_KEY_LEVELS), partial(values_of_int4, levels=INT4_VALUE_LEVELS)),
}


class CodedParts(NamedTuple):
    """Views of a layer's batches, of shape (heads, splits, batches, ...): uint8, and scales as float16."""

    keys: tuple[Array, ...]  # (16, bytes) each: codes, of INT4 their lower and their upper bits
    values: Array  # of FP8 (8, head_dim, 2), of INT4 (8, head_dim / 4, 2, 2): pairs of positions, two bytes of each
    scales: Array  # (16, 2)
    kv_dtype: str

    def store(self, places: Places, rows: tuple[Array, Array]) -> None:
        """Round keys and values (positions, heads, head_dim) and write them."""
        split, batch, row = places
        keys, values = (encode(part) for encode, part in zip(_ENCODE[self.kv_dtype], rows, strict=True))
        for part, packed in zip(self.keys, _packed_keys(keys.codes, len(self.keys)), strict=True):
            part[:, split, batch, row] = packed.swapaxes(0, 1)
        packed = values.codes if self.values.ndim == 6 else _in(_nibbles(values.codes), 2)
        self.values[:, split, batch, row // 2, :, row % 2] = packed
        for number, coded in enumerate((keys, values)):
            self.scales[:, split, batch, row, number] = coded.scales[..., 0].swapaxes(0, 1)

    def load(self, places: Places) -> tuple[Array, Array]:
        """Keys and values (positions, heads, head_dim), float32."""
        split, batch, row = places
        keys = _unpacked_keys(*(part[:, split, batch, row].swapaxes(0, 1) for part in self.keys))
        packed = self.values[:, split, batch, row // 2, :, row % 2]
        values = packed if self.values.ndim == 6 else _of_nibbles(_flat(packed, 2))
        scales = self.scales[:, split, batch, row].swapaxes(0, 1)[..., None]
        found = (
            decode(CodedRows(codes, scales[:, :, number]))
            for number, (decode, codes) in enumerate(zip(_DECODE[self.kv_dtype], (keys, values), strict=True))
        )
        of_keys, of_values = found
        return of_keys, of_values


def coded_parts(batches: Array, head_dim: int, kv_dtype: str) -> CodedParts:
    """Of `batches` (heads, splits, batches, bytes of a batch), uint8."""
    shape = batches.shape[:-1]
    if kv_dtype == "fp8":
        keys, values, scales = np.split(batches, (16 * head_dim, 32 * head_dim), axis=-1)
        of_keys: tuple[Array, ...] = (keys.reshape(*shape, 16, head_dim),)
        of_values = values.reshape(*shape, 8, head_dim, 2)
    else:
        keys, tops, values, scales = np.split(batches, (8 * head_dim, 12 * head_dim, 20 * head_dim), axis=-1)
        of_keys = keys.reshape(*shape, 16, head_dim // 2), tops.reshape(*shape, 16, head_dim // 4)
        of_values = values.reshape(*shape, 8, head_dim // 4, 2, 2)
    return CodedParts(of_keys, of_values, scales.view(np.float16).reshape(*shape, 16, 2), kv_dtype)


def _packed_keys(codes: Codes, num_parts: int) -> tuple[Codes, ...]:
    if num_parts == 1:
        return (codes,)
    halves = _in(codes, 2, 2, 2, 2).swapaxes(-4, -3)  # words of upper bits: byte of a half, two numbers of bits of it, half
    halves = halves.reshape(*halves.shape[:-4], 2, 4, 2)
    tops = np.bitwise_or.reduce(halves >> np.uint8(4) << _PLACES, axis=-2)
    halves = _in(codes, 2, 4)  # words of lower bits: byte of a half, bits and half
    lows = _nibbles(halves[..., [0, 2, 1, 3]] & np.uint8(15))  # ..., byte of a half, half
    return tuple(_flat(part.swapaxes(-1, -2), 3) for part in (lows, tops))


def _unpacked_keys(lows: Codes, tops: Codes | None = None) -> Codes:
    if tops is None:
        return lows
    of_lows = _flat(_of_nibbles(_in(lows, 2, 2).swapaxes(-1, -2))[..., [0, 2, 1, 3]], 3)
    of_tops = _in(tops, 2, 2).swapaxes(-1, -2)
    upper = _in(_flat(of_tops[..., None, :] >> _PLACES & np.uint8(3), 4), 2, 2, 2, 2).swapaxes(-4, -3)
    upper = _flat(upper, 5)
    return of_lows | upper << np.uint8(4)


def _nibbles(codes: Codes) -> Codes:
    """Two neighbouring codes in a byte."""
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def _of_nibbles(packed: Codes) -> Codes:
    return _flat(np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=-1), 2)


def _in(codes: Codes, *sizes: int) -> Codes:
    """The last dimension in pieces of these sizes; it may be the only one that is not empty."""
    return codes.reshape(*codes.shape[:-1], codes.shape[-1] // prod(sizes), *sizes)


def _flat(codes: Codes, count: int) -> Codes:
    """The last `count` dimensions in one."""
    return codes.reshape(*codes.shape[:-count], prod(codes.shape[-count:]))


def rounded_rows(keys: Array, values: Array, kv_dtype: str) -> tuple[Array, Array]:
    """What is kept of rows (..., head_dim), float32."""
    found = [np.array(part, np.float32) for part in (keys, values)]
    for enter, part in zip(KV_FORMATS[kv_dtype], found, strict=True):
        enter(part)
    of_keys, of_values = found
    return of_keys, of_values
