"""What the delta nets of a chunk of tokens work in."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from kog_dist.records import dataclass
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.delta_blocks import BLOCK, num_blocks

Front = Callable[[str, tuple[int, ...], DTypeLike, int], Array]  # as PromptBuffers._front


@dataclass(frozen=True)
class DeltaRows:
    """Views for a chunk of tokens, which make B blocks. L: hosted lanes, T: the products' type."""

    projected: Array  # (size, L * matrix_rows) float32: inputs; in the place of values the rule's outputs come to stand
    query: Array  # (B * BLOCK, L * key heads, key_dim) T
    key: Array  # the same
    value: Array  # (B * BLOCK, L * heads, value_dim) T
    logs: Array  # (L * heads, B * BLOCK) float32: logarithms of decays, from the first token of each block on
    beta: Array  # (L * heads, B * BLOCK) float32
    solved: Array  # (2, L * heads, B, BLOCK, BLOCK) T: of each block's system the inverse, and what rounding leaves of it
    seen: Array  # the same of queries times keys, decayed: what of a token's change another token sees


def delta_rows(shape: DeltaShape, size: int, largest: int, projected: Array, half: DTypeLike, front: Front) -> DeltaRows:
    """Of a chunk of `size` tokens, where the largest has `largest`. `projected`: memory for the input of the nets."""
    net, blocks, most = shape.net, num_blocks(size), num_blocks(largest)
    heads, key_heads, padded = shape.num_lanes * shape.heads, shape.num_lanes * shape.key_heads, blocks * BLOCK

    def view(name: str, *sizes: int, dtype: DTypeLike) -> Array:
        return front(f"delta {name}", sizes, dtype, prod(sizes) // blocks * most)

    return DeltaRows(
        projected=projected,
        query=view("query", padded, key_heads, net.key_dim, dtype=half),
        key=view("key", padded, key_heads, net.key_dim, dtype=half),
        value=view("value", padded, heads, net.value_dim, dtype=half),
        logs=view("logs", heads, padded, dtype=np.float32),
        beta=view("beta", heads, padded, dtype=np.float32),
        solved=view("solved", 2, heads, blocks, BLOCK, BLOCK, dtype=half),
        seen=view("seen", 2, heads, blocks, BLOCK, BLOCK, dtype=half),
    )


def delta_row_bytes(shape: DeltaShape) -> int:
    """Of `DeltaRows` without `projected`, of each row of all blocks."""
    net = shape.net
    of_lane = 2 * 2 * shape.key_heads * net.key_dim + shape.heads * (2 * net.value_dim + 2 * 4 + 2 * 2 * 2 * BLOCK)
    return shape.num_lanes * of_lane
