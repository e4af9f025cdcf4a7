"""Products of large chunks by Hopper's matrix units, with what comes behind them in the same kernel (gemm.cuh), queued on
cupy's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address
from kog_dist.workers.prefill.base.hopper_abi import NUM_THREADS
from kog_dist.workers.prefill.gemm.gemm_abi import CLUSTER, CLUSTER_ROWS, COLUMNS, DEPTH, TILE_PARAMS, TILE_ROWS, TileShape

# Tiles from which on gate_up was faster than cuBLAS and swiglu: those of 512 rows of 2B's eight lanes. With half of them it took
# as long.
_LEAST_TILES = 192
_MOST_BAND = 8  # clusters of rows whose tiles are taken together: with the columns under way beside them they are about a square
_BOX_ROWS = 64  # of the matrix, in one copy


def build(shape: TileShape) -> compiler.Cubin:
    """The cubin of a kernel. Raises CompileError with the compiler's log."""
    return compiled.build(shape.kernel, shape.header())


def tiles_on_gpu(shape: TileShape) -> Tiles:
    """A kernel on the current GPU. Raises CompileError or LaunchError."""
    import cupy

    cupy.zeros(1)  # makes a context, if nobody has done so
    kernel = Kernel(build(shape).path, shape.kernel, shape.shared_bytes)
    num_clusters = kernel.clusters_at_once(CLUSTER, NUM_THREADS)
    return Tiles(shape, num_clusters, partial(compiled.launch, kernel), tensor_map)


class Tiles:
    """One of the kernels.

    `launch`: called with thread blocks, threads of each, parameters, and whether it may begin early. `make_map`: as `tensor_map`.
    """

    def __init__(
        self,
        shape: TileShape,
        num_clusters: int,
        launch: Callable[[int, int, bytes, bool], None],
        make_map: Callable[[int, Sequence[int], Sequence[int], Sequence[int]], NDArray[np.uint64]],
    ) -> None:
        self.shape, self.num_clusters = shape, num_clusters
        self._launch, self._make_map = launch, make_map

    def is_worth(self, lanes: int, size: int) -> bool:
        """Whether chunks of `size` rows fit, and have enough of them to be faster than with a product of cuBLAS."""
        return size % CLUSTER_ROWS == 0 and self._num_tiles(lanes, size) >= _LEAST_TILES

    def fits(self, matrix: Array) -> bool:
        """Whether the kernel is made for such a matrix."""
        return bool(matrix.shape[1:] == (self.shape.width, self.shape.inner) and matrix.flags.c_contiguous)

    def run(self, x: Array, matrix: Array, **arrays: Array) -> None:
        """Queue it: `x` (lanes, size, inner) times the transposed `matrix` (lanes, width, inner), and what comes behind it.

        `size` is a multiple of 256. All lanes of `x` may be one (stride 0). `arrays`: for the pointers of their names.
        """
        lanes, size, _ = x.shape
        assert size % CLUSTER_ROWS == 0
        assert self.fits(matrix)
        params = np.zeros((), TILE_PARAMS.dtype)
        params["x_map"], params["matrix_map"] = self._x_map(x), self._matrix_map(matrix)
        for name, array in arrays.items():
            assert array.flags.c_contiguous
            params[f"{name}_ptr"] = address(array)
        num_tiles, of_lane = self._num_tiles(lanes, size), size // CLUSTER_ROWS
        params["rows"], params["num_tiles"], params["is_shared"] = size, num_tiles, x.strides[0] == 0
        params["band"] = max(band for band in range(1, _MOST_BAND + 1) if of_lane % band == 0)
        self._launch(CLUSTER * min(self.num_clusters, num_tiles), NUM_THREADS, params.tobytes(), True)

    def _num_tiles(self, lanes: int, size: int) -> int:
        return lanes * (size // CLUSTER_ROWS) * (self.shape.width // COLUMNS)

    def _x_map(self, x: Array) -> NDArray[np.uint64]:
        lanes, size, inner = x.shape
        lane_bytes, row_bytes, value_bytes = x.strides
        assert value_bytes == x.itemsize
        if lane_bytes == 0:
            lanes, lane_bytes = 1, size * row_bytes
        return self._map(x, (inner, size, lanes), (row_bytes, lane_bytes), (DEPTH, TILE_ROWS, 1))

    def _matrix_map(self, matrix: Array) -> NDArray[np.uint64]:
        """In a product, a thread has columns 2 q and 2 q + 1 of each 8. So that it gets 8 neighbouring results from 8 q on, row
        e + 2 q + 8 j of a box is row 8 q + 2 j + e of 32. With gates and ups, of 32 activations, its row e + 2 q + 8 s + 16 j is
        gate (s = 0) or up of activation 8 q + 2 j + e.
        """
        lanes, rows, inner = matrix.shape
        if self.shape.interleaves:  # e; q, and 32 activations; gates and ups of a lane; j
            sizes, steps, box = (2, rows // 16, 2 * lanes, 4), (1, 8, rows // 2, 2), (2, 4, 2, 4)
        else:  # e; q; j; 32 rows
            sizes, steps, box = (2, 4, 4, lanes * rows // 32), (1, 8, 2, 32), (2, 4, 4, _BOX_ROWS // 32)
        return self._map(matrix, (inner, *sizes), tuple(2 * inner * step for step in steps), (DEPTH, *box))

    def _map(self, array: Array, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> NDArray[np.uint64]:
        assert array.dtype == np.float16
        return self._make_map(address(array), sizes, strides, box)
