"""Gates, ups and SwiGLU of a block of tokens as one kernel (gate_up.cu), queued on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.workers.prefill import compiled
from kog_dist.workers.prefill.gate_up_abi import (
    ACTIVATIONS,
    CLUSTER,
    CLUSTER_ROWS,
    DEPTH,
    GATE_UP_PARAMS,
    TILE_ROWS,
    GateUpShape,
)
from kog_dist.workers.prefill.hopper_abi import NUM_THREADS

if TYPE_CHECKING:
    from torch import Tensor

# Tiles from which on the kernel was faster than cuBLAS and swiglu: those of 512 rows of 2B's eight lanes. With half of them it
# took as long.
_LEAST_TILES = 192
_MOST_BAND = 8  # clusters of rows whose tiles are taken together: with the columns under way beside them they are about a square
_BOX_ROWS = 64  # of the matrix, in one copy


def build(shape: GateUpShape) -> compiler.Cubin:
    """The cubin of gate_up.cu. Raises CompileError with the compiler's log."""
    return compiled.build("gate_up", shape.header())


def gate_up_on_gpu(shape: GateUpShape) -> GateUp:
    """Gates and ups on torch's current GPU. Raises CompileError or LaunchError."""
    import torch

    torch.zeros(1, device="cuda").item()  # makes a context, if nobody has done so
    kernel = Kernel(build(shape).path, "gate_up", shape.shared_bytes)
    num_clusters = kernel.clusters_at_once(CLUSTER, NUM_THREADS)
    return GateUp(shape, num_clusters, partial(compiled.launch, kernel), tensor_map)


class GateUp:
    """Gates and ups of one rank's lanes.

    `launch`: called with thread blocks, threads of each, parameters, and whether it may begin early. `make_map`: as `tensor_map`.
    """

    def __init__(
        self,
        shape: GateUpShape,
        num_clusters: int,
        launch: Callable[[int, int, bytes, bool], None],
        make_map: Callable[[int, Sequence[int], Sequence[int], Sequence[int]], NDArray[np.uint64]],
    ) -> None:
        self.shape, self.num_clusters = shape, num_clusters
        self._launch, self._make_map = launch, make_map

    def is_worth(self, lanes: int, size: int) -> bool:
        """Whether blocks of `size` rows fit, and have enough of them to be faster than with a product and swiglu."""
        return size % CLUSTER_ROWS == 0 and self._num_tiles(lanes, size) >= _LEAST_TILES

    def run(self, x: Tensor, matrix: Tensor, inverse_rms: Tensor, activation: Tensor) -> None:
        """activation (lanes, size, ffn) = silu(gate) * up, of gates and ups = `inverse_rms` (lanes, size) times `x` (lanes, size,
        hidden) times the transposed `matrix` (lanes, 2 * ffn, hidden): gate rows, then up rows. `size` is a multiple of 256.

        All lanes of `x` may be one (stride 0).
        """
        lanes, size, _ = x.shape
        assert size % CLUSTER_ROWS == 0
        assert inverse_rms.is_contiguous()
        assert activation.is_contiguous()
        params: Any = np.zeros((), GATE_UP_PARAMS.dtype)
        params["x_map"], params["matrix_map"] = self._x_map(x), self._matrix_map(matrix)
        params["inverse_rms_ptr"], params["activation_ptr"] = inverse_rms.data_ptr(), activation.data_ptr()
        params["rows"], params["num_tiles"] = size, self._num_tiles(lanes, size)
        params["band"] = max(band for band in range(1, _MOST_BAND + 1) if size // CLUSTER_ROWS % band == 0)
        params["is_shared"] = x.stride(0) == 0
        num_ctas = CLUSTER * min(self.num_clusters, self._num_tiles(lanes, size))
        self._launch(num_ctas, NUM_THREADS, params.tobytes(), True)

    def _num_tiles(self, lanes: int, size: int) -> int:
        return lanes * (size // CLUSTER_ROWS) * (self.shape.ffn // ACTIVATIONS)

    def _x_map(self, x: Tensor) -> NDArray[np.uint64]:
        lanes, size, hidden = x.shape
        assert x.stride(2) == 1
        sizes, strides = (hidden, size, lanes), (2 * x.stride(1), 2 * x.stride(0))
        if x.stride(0) == 0:
            sizes, strides = (hidden, size, 1), (strides[0], size * strides[0])
        return self._map(x, sizes, strides, (DEPTH, TILE_ROWS, 1))

    def _matrix_map(self, matrix: Tensor) -> NDArray[np.uint64]:
        """A box: the 64 rows of 32 activations. Its row e + 2 q + 8 s + 16 i is gate (s = 0) or up of activation 8 q + 2 i + e.

        A thread has columns 2 q and 2 q + 1 of each 8 of a product: so it has gates and ups of the activations from 8 q on.
        """
        lanes, rows, hidden = matrix.shape
        assert matrix.is_contiguous()
        sizes = (hidden, 2, rows // 16, 2 * lanes, 4)  # of e, of q and 32 activations, of gates and ups of a lane, of i
        strides = tuple(2 * hidden * count for count in (1, 8, rows // 2, 2))
        return self._map(matrix, sizes, strides, (DEPTH, 2, _BOX_ROWS // 16, 2, 4))

    def _map(self, tensor: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> NDArray[np.uint64]:
        import torch

        assert tensor.dtype is torch.float16
        return self._make_map(tensor.data_ptr(), sizes, strides, box)
