"""Arrays in memory that begins where sums like it."""

from __future__ import annotations

from math import prod
from typing import Any

from kog_dist.late_numpy import NDArray, np

Array = NDArray[Any]  # float32 or float64, C-contiguous; starts at a multiple of 64 bytes unless it is called a view


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialised C-contiguous array that starts at a multiple of 64 bytes, so that sums never depend on its place."""
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.empty(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
