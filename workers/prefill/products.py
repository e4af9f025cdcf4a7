"""Matrix products of our own (products.cu): by Hopper's matrix units, with SwiGLU on the way out if it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.cuda import build as compiler
from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.workers.prefill.prefill_abi import PRODUCT_PARAMS, PRODUCT_SHARED_BYTES, product_header

if TYPE_CHECKING:
    from torch import Tensor

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, STORED_ROWS = 128, 256, 64, 64
_THREADS = 384
_SOURCE_FOLDERS = (("kog_dist.workers", "prefill"), ("kog_dist.collectives", "device"))


def build_products() -> compiler.Cubin:
    """The cubin of products.cu. Raises CompileError with the compiler's log."""
    return compiler.build({**compiler.read_sources(*_SOURCE_FOLDERS), "product_shape.cuh": product_header()}, "products.cu")


class Products:
    """Products of binary16 values, queued on torch's current stream. Raises CompileError or LaunchError."""

    def __init__(self) -> None:
        import torch

        path = build_products().path
        self._plain, self._gated = (Kernel(path, name, PRODUCT_SHARED_BYTES) for name in ("product", "gated_product"))
        self._num_clusters = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """out (L, rows, N) = x (L, rows, K) times the transposed `matrix` (L, N, K); any strides but of the last dimension."""
        params = self._params(x, matrix, out, TILE_COLUMNS)
        params["half_offset"] = TILE_COLUMNS // 2
        self._launch(self._plain, params)

    def gated(self, x: Tensor, matrix: Tensor, inverse_rms: Tensor, out: Tensor) -> None:
        """out (L, rows, F) = silu(gate) * up, of gate and up = x times `matrix` (L, 2F, K), times 1 / rms (L, rows)."""
        params = self._params(x, matrix, out, TILE_COLUMNS // 2)
        params["half_offset"], params["inverse_rms_ptr"] = out.shape[2], inverse_rms.data_ptr()
        params["size"] = inverse_rms.shape[1]
        self._launch(self._gated, params)

    def _params(self, x: Tensor, matrix: Tensor, out: Tensor, columns: int) -> Any:
        params = np.zeros((), PRODUCT_PARAMS.dtype)
        lanes, num_rows, depth = x.shape
        box = (TILE_DEPTH, TILE_ROWS, 1)
        params["x_map"], params["matrix_map"] = _map(x, box), _map(matrix, box)
        params["out_map"] = _map(out, (TILE_DEPTH, STORED_ROWS, 1))
        params["num_rows"] = num_rows
        params["num_pairs"], params["num_columns"] = -(-num_rows // (2 * TILE_ROWS)), -(-out.shape[2] // columns)
        params["num_tiles"] = params["num_pairs"] * params["num_columns"] * lanes
        params["num_steps"] = -(-depth // TILE_DEPTH)
        return params

    def _launch(self, kernel: Kernel, params: Any) -> None:
        import torch

        num_ctas = 2 * min(self._num_clusters, int(params["num_tiles"]))
        kernel.launch_grid(num_ctas, _THREADS, params.tobytes(), torch.cuda.current_stream().cuda_stream)


def _map(tensor: Tensor, box: tuple[int, int, int]) -> Any:
    """The 16 words of a tensor map; dimensions are the other way round."""
    import torch

    assert tensor.dtype is torch.float16
    assert tensor.stride(2) == 1
    lanes, rows, columns = tensor.shape
    strides = (2 * tensor.stride(1), 2 * tensor.stride(0))
    return tensor_map(tensor.data_ptr(), (columns, rows, lanes), strides, box)
