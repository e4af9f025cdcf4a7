"""Launches of fused kernels that share one struct of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kog_dist.runtime.abi import Struct
from kog_dist.workers.prefill.base.arrays import Array, address

Launchers = Mapping[str, Callable[[int, int, bytes, bool], None]]


class KernelCalls:
    """`launchers`: by kernel; called with thread blocks, threads of each, parameters, and whether it may begin early.

    `arrays` are what all launches have in common, by the names of their pointers. They are held.
    """

    def __init__(self, params: Struct, launchers: Launchers, arrays: Mapping[str, Array]) -> None:
        self._launchers, self._arrays = launchers, arrays
        self._params = np.zeros((), params.dtype)
        for name, array in arrays.items():
            self._params[f"{name}_ptr"] = address(array)

    def __call__(
        self,
        kernel: str,
        num_ctas: int,
        num_threads: int,
        *,
        early: bool = False,
        rows_map: NDArray[np.uint64] | None = None,
        **fields: Array | float | None,
    ) -> None:
        """`fields`: arrays are for the pointers of their names; None: there is none. `early`: see `Kernel.launch_grid`.
        `rows_map`: a tensor map, of kernels that have one.
        """
        params = self._params.copy()
        if rows_map is not None:
            params["rows_map"] = rows_map
        for name, value in fields.items():
            if isinstance(value, (int, float)):
                params[name] = value
            else:
                params[f"{name}_ptr"] = 0 if value is None else address(value)
        self._launchers[kernel](num_ctas, num_threads, params.tobytes(), early)
