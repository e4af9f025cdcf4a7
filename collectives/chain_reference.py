"""What the benchmark's chain of all-reduces (kernels/chain.cu) computes, in NumPy, bit by bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.reference import Vector, tree_sum


def chain_totals(bias: NDArray[np.float32], num_steps: int, shift: int) -> Vector:
    """The total after `num_steps` steps from zeros; `bias` is (num_ranks, length). `shift` is 0 for chains of owners alone."""
    total = np.zeros(bias.shape[1], np.float32)
    quarter = np.float32(0.25)
    for _ in range(num_steps):
        total = tree_sum(np.roll(total, -shift)[None] * quarter + bias)
    return total
