"""Attention of a chunk of tokens with heads that are too wide for attention.cu (wide_attention.cu), on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from kog_dist.cuda.driver import Kernel
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.attention.wide_abi import WIDE_PARAMS, WIDE_ROWS, WIDE_THREADS, wide_header, wide_shared_bytes
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address, with_room


def wide_attention_on_gpu(shape: AttentionShape) -> WideAttention:
    """On the current GPU. Raises CompileError or LaunchError."""
    import cupy

    cupy.zeros(1)  # makes a context, if nobody has done so
    kernel = Kernel(compiled.build("wide_attention", wide_header(shape)).path, "attend_wide", wide_shared_bytes(shape))
    return WideAttention(shape, partial(compiled.launch, kernel))


class WideAttention:
    """Attention with the heads of one rank, over all positions. Outputs of all chunks share their memory, as in `Attention`.

    `launch`: called with thread blocks, threads of each, parameters, and whether it may begin early.
    """

    def __init__(self, shape: AttentionShape, launch: Callable[[int, int, bytes, bool], None]) -> None:
        self.shape, self._launch = shape, launch
        self._outputs: Array | None = None

    def run(
        self,
        query: Array,
        keys: Array,
        values: Array,
        place: Array,
        window: int | None,
        sinks: Array | None = None,
        *,
        is_ordered: bool = False,
    ) -> Array:
        """As `Attention.run`, without windows, sinks, and other orders: prefill refuses models that need them."""
        assert window is None
        assert sinks is None
        assert not is_ordered
        shape, size = self.shape, len(query)
        self._outputs = with_room(self._outputs, query.size, query)
        out: Array = self._outputs[: query.size].reshape(shape.num_heads // shape.lane_heads, size, -1)
        params = np.zeros((), WIDE_PARAMS.dtype)
        for name, array in (("query", query), ("keys", keys), ("values", values), ("place", place), ("out", out)):
            assert array.flags.c_contiguous
            params[f"{name}_ptr"] = address(array)
        params["size"], params["num_tiles"] = size, -(-size // WIDE_ROWS)
        self._launch(int(params["num_tiles"]) * shape.num_heads, WIDE_THREADS, params.tobytes(), False)
        return out
