"""Tensor maps of gateup.cu: (address, sizes, strides in bytes, box), the fastest dimension first."""

from __future__ import annotations

import numpy as np

PARAMS = np.dtype(
    {
        "names": ["x", "matrix", "inverse_rms", "out", "diagnosis", "rows", "group", "is_reversed", "num_tiles"],
        "formats": [("<u8", 16), ("<u8", 16), "<u8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4"],
        "offsets": [0, 128, 256, 264, 272, 280, 284, 288, 292],
        "itemsize": 320,
    }
)


def x_map(address, lanes, rows, hidden, box_rows):
    return address, (hidden, rows, lanes), (2 * hidden, 2 * hidden * rows), (64, box_rows, 1)


def matrix_map(address, lanes, ffn, hidden, *, is_rearranged):
    """A box of 64 rows for 32 activations: row n of it is, n = e + 2 q + 8 s + 16 i, gate (s = 0) or up of activation 8 q + 2 i + e.

    As they are: gate rows of a lane, then its up rows. Rearranged: in the order of boxes.
    """
    row = 2 * hidden
    if is_rearranged:
        return address, (hidden, 64, ffn // 8, 2 * lanes, 1), (row, 16 * row, ffn * row, row), (64, 64, 1, 1, 1)
    return address, (hidden, 2, ffn // 8, 2 * lanes, 4), (row, 8 * row, ffn * row, 2 * row), (64, 2, 4, 2, 4)


def order(ffn):
    """Of a lane's rows: which one stands where, rearranged."""
    n = np.arange(2 * ffn)
    e, q, s, i, block = n % 2, n // 2 % 4, n // 8 % 2, n // 16 % 4, n // 64
    return s * ffn + 32 * block + 8 * q + 2 * i + e


def rearranged(w):
    """Gate and up rows (lanes, 2 ffn, hidden) in the order of boxes."""
    return w[:, order(w.shape[1] // 2)].copy()
