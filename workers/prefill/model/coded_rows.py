"""The rows of a KV cache of FP8 (phases/attend_cache.cuh, kv_codes.cuh): for those who fill or read it from outside.

A batch is 16 rows of codes of K; 8 pairs of rows of V: for every dimension the code of the even position and that of the odd one;
and for each position the scales of its rows of K and V.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kog_dist.decode.kv_formats import CodedRows, encode_fp8, values_of_fp8
from kog_dist.workers.prefill.arrays import Array

Places = tuple[Array, Array, Array]  # of positions: split, batch, row


class CodedParts(NamedTuple):
    """Views of a layer's batches: codes as uint8, scales as float16."""

    keys: Array  # (heads, splits, batches, 16, head_dim)
    values: Array  # (heads, splits, batches, 8, head_dim, 2)
    scales: Array  # (heads, splits, batches, 16, 2)


def coded_parts(batches: Array, head_dim: int) -> CodedParts:
    """Of `batches` (heads, splits, batches, bytes of a batch), uint8."""
    of_keys = 16 * head_dim
    keys, values, scales = np.split(batches, (of_keys, 2 * of_keys), axis=-1)
    shape = batches.shape[:-1]
    return CodedParts(
        keys.reshape(*shape, 16, head_dim), values.reshape(*shape, 8, head_dim, 2), scales.view(np.float16).reshape(*shape, 16, 2)
    )


def store_rows(parts: CodedParts, places: Places, rows: tuple[Array, Array]) -> None:
    """Round keys and values (positions, heads, head_dim) and write them."""
    split, batch, row = places
    for number, values in enumerate(rows):
        codes, scales = encode_fp8(values)
        if number == 0:
            parts.keys[:, split, batch, row] = codes.swapaxes(0, 1)
        else:
            parts.values[:, split, batch, row // 2, :, row % 2] = codes
        parts.scales[:, split, batch, row, number] = scales[..., 0].swapaxes(0, 1)


def load_rows(parts: CodedParts, places: Places) -> tuple[Array, Array]:
    """Keys and values (positions, heads, head_dim), float32."""
    split, batch, row = places
    codes = parts.keys[:, split, batch, row].swapaxes(0, 1), parts.values[:, split, batch, row // 2, :, row % 2]
    scales = parts.scales[:, split, batch, row].swapaxes(0, 1)[..., None]
    keys, values = (values_of_fp8(CodedRows(of_codes, scales[:, :, number])) for number, of_codes in enumerate(codes))
    return keys, values


def rounded_rows(rows: Array) -> Array:
    """What is kept of rows (..., head_dim), float32."""
    return values_of_fp8(encode_fp8(rows))
