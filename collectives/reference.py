"""What every collective computes, in NumPy over the values of all ranks. Communicators must match it bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


def tree_sum(rows: NDArray[np.float32]) -> Vector:
    """Sum over the first axis by adding adjacent pairs until one row is left; an odd last row goes up unchanged.

    A run of 2^k adjacent rows that starts at a multiple of 2^k is a subtree. That is why a rank may send the sum of its own
    lanes: whoever continues the tree over ranks gets the bits of the tree over lanes.
    """
    if len(rows) == 0:
        raise ValueError("cannot sum over no rows")
    while len(rows) > 1:
        even = len(rows) & ~1
        pairs = rows[0:even:2] + rows[1:even:2]
        rows = np.concatenate((pairs, rows[even:])) if even < len(rows) else pairs
    total: Vector = rows[0]
    return total


def all_gather(values: Sequence[Vector]) -> NDArray[np.float32]:
    """(world_size, length): rank r's vector in row r, on every rank."""
    return np.stack(values)


def all_reduce(values: Sequence[Vector]) -> Vector:
    """`tree_sum` of the ranks' vectors, on every rank. `delayed_reduce` is the same, published earlier."""
    return tree_sum(np.stack(values))
