"""Host memory that the GPU addresses."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pinned(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed page-locked host memory that the GPU can address; freed with the array."""
    import cupy

    memory = cupy.cuda.alloc_pinned_memory(num_bytes)
    array = np.frombuffer(memory, np.uint8, num_bytes)
    array[:] = 0
    return array
