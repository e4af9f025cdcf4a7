"""Matrix products of our own (products.cu): by Hopper's matrix units, with SwiGLU on the way out if it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.workers.prefill.prefill_abi import (
    LARGE_SHARED_BYTES,
    LARGE_THREADS,
    PRODUCT_PARAMS,
    SMALL_SHARED_BYTES,
    SMALL_THREADS,
    product_header,
)

if TYPE_CHECKING:
    from torch import Tensor

TILE_ROWS, TILE_DEPTH, STORED_ROWS = 128, 64, 64
SMALL_ROWS = 128  # products of so many rows at most are bounded by the memory that the matrix is read from
_SOURCE_FOLDERS = (("kog_dist.workers", "prefill"), ("kog_dist.collectives", "device"))


def build_products() -> compiler.Cubin:
    """The cubin of products.cu. Raises CompileError with the compiler's log."""
    return compiler.build({**compiler.read_sources(*_SOURCE_FOLDERS), "product_shape.cuh": product_header()}, "products.cu")


class Products:
    """Products of binary16 values, queued on torch's current stream; they overlap with what is queued before if they may.

    Raises CompileError or LaunchError.
    """

    def __init__(self, *, overlaps: bool = False) -> None:
        import torch

        self._overlaps = overlaps
        path = build_products().path
        self._large, self._small = (
            {is_gated: Kernel(path, prefix + name, shared) for is_gated, name in ((False, "product"), (True, "gated_product"))}
            for prefix, shared in (("", LARGE_SHARED_BYTES), ("small_", SMALL_SHARED_BYTES))
        )
        self._num_clusters = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """out (L, rows, N) = x (L, rows, K) times the transposed `matrix` (L, N, K); any strides but of the last dimension."""
        self._launch(x, matrix, out, None)

    def gated(self, x: Tensor, matrix: Tensor, inverse_rms: Tensor, out: Tensor) -> None:
        """out (L, rows, F) = silu(gate) * up, of gate and up = x times `matrix` (L, 2F, K), times 1 / rms (L, rows)."""
        self._launch(x, matrix, out, inverse_rms)

    def _launch(self, x: Tensor, matrix: Tensor, out: Tensor, inverse_rms: Tensor | None) -> None:
        import torch

        (lanes, num_rows, depth), is_gated, is_large = x.shape, inverse_rms is not None, x.shape[1] > SMALL_ROWS
        half = 128 if is_large else 64  # rows of the matrix in half of a tile
        params: Any = np.zeros((), PRODUCT_PARAMS.dtype)
        params["x_map"], params["matrix_map"] = _map(x, (TILE_DEPTH, TILE_ROWS, 1)), _map(matrix, (TILE_DEPTH, half, 1))
        params["out_map"], params["num_rows"] = _map(out, (TILE_DEPTH, STORED_ROWS, 1)), num_rows
        params["num_bands"] = -(-num_rows // (TILE_ROWS * (2 if is_large else 1)))
        params["num_columns"], params["half_offset"] = -(-out.shape[2] // (2 * half)), half
        if inverse_rms is not None:
            params["num_columns"], params["half_offset"] = -(-out.shape[2] // half), out.shape[2]
            params["inverse_rms_ptr"], params["size"] = inverse_rms.data_ptr(), inverse_rms.shape[1]
        num_tiles = int(params["num_bands"] * params["num_columns"] * lanes)
        params["num_tiles"], params["num_steps"] = num_tiles, -(-depth // TILE_DEPTH)
        stream = torch.cuda.current_stream().cuda_stream
        if is_large:
            num_ctas = 2 * min(self._num_clusters, num_tiles)
            self._large[is_gated].launch_grid(num_ctas, LARGE_THREADS, params.tobytes(), stream, overlaps=self._overlaps)
        else:
            kernel = self._small[is_gated]  # one tile for each thread block
            kernel.launch_grid(num_tiles, SMALL_THREADS, params.tobytes(), stream, overlaps=self._overlaps)


def _map(tensor: Tensor, box: tuple[int, int, int]) -> Any:
    """The 16 words of a tensor map; dimensions are the other way round."""
    import torch

    assert tensor.dtype is torch.float16
    assert tensor.stride(2) == 1
    lanes, rows, columns = tensor.shape
    strides = (2 * tensor.stride(1), 2 * tensor.stride(0))
    return tensor_map(tensor.data_ptr(), (columns, rows, lanes), strides, box)
