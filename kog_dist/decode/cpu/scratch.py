"""Memory that calls of the C library work in."""

from __future__ import annotations

import numpy as np

from kog_dist.model.aligned import aligned_empty


class Scratch:
    """Memory that calls of the library work in, one after the other. It grows before they are made."""

    def __init__(self) -> None:
        self._array = aligned_empty((0,), np.dtype(np.float32))
        self.address = 0

    def reserve(self, num_values: int) -> None:
        """Have room for so many float32 at least."""
        if num_values > self._array.size:
            self._array = aligned_empty((num_values,), np.dtype(np.float32))
            self.address = self._array.ctypes.data
