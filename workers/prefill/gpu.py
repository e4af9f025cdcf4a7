"""Prefill beside a monokernel: each size of blocks is one CUDA graph, captured at the start and replayed ever after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.prefill.blocks import BLOCK_SIZES, Block
from kog_dist.workers.prefill.buffers import Buffers
from kog_dist.workers.prefill.cache_layout import CacheLayout
from kog_dist.workers.prefill.device_operations import DeviceOperations, observer
from kog_dist.workers.prefill.exchange import OneRank, SumExchange
from kog_dist.workers.prefill.layers import Layers
from kog_dist.workers.prefill.matrices import LayerMatrices, Matrices
from kog_dist.workers.prefill.prefill import Prefill, load_prompt

if TYPE_CHECKING:
    import torch

    from kog_dist.workers.cuda.kernel_shape import KernelShape


def matrices_for(shape: KernelShape) -> tuple[Matrices, Callable[[str, Any], None]]:
    """An empty collection in the products' type, and the observer that `load_weights` fills it through."""
    import torch

    matrices = Matrices(shape.spec, torch.float16)
    return matrices, observer(matrices.take, matrices.wants, shape.weight_dtype)


def prefill_for(
    kernel: Monokernel,
    matrices: Sequence[LayerMatrices],
    *,
    exchange: SumExchange | None = None,
    sizes: Sequence[int] = BLOCK_SIZES,
) -> Prefill:
    """Prefill into the KV cache of `kernel`, on its stream; never to be run while a launch of it is under way.

    Takes some hundred ms: compiles or loads the fused kernels, and runs and captures a block of each size. Collective when there
    are several ranks. Raises CompileError, LaunchError, or ConfigError for a model that it cannot run.
    """
    return Prefill(runner_for(kernel, matrices, exchange, sizes), max_context=kernel.shape.spec.max_context, sizes=sizes)


def runner_for(
    kernel: Monokernel, matrices: Sequence[LayerMatrices], exchange: SumExchange | None, sizes: Sequence[int]
) -> GraphRunner:
    """The runner of `prefill_for`."""
    import numpy as np
    import torch

    shape = kernel.shape
    buffers = Buffers(CacheLayout.of(shape), torch.float16, max(sizes), "cuda")
    embedding = torch.as_tensor(kernel.weights.embedding.view(np.int16), device="cuda")
    cache = torch.as_tensor(kernel.kv.view(np.int16), device="cuda")
    operations = DeviceOperations(buffers, embedding, cache, weight_dtype=shape.weight_dtype, kv_dtype=shape.kv_dtype)
    layers = Layers(shape.spec, matrices, operations, exchange or OneRank())
    return GraphRunner(layers, buffers, sizes, torch.cuda.ExternalStream(kernel.stream.ptr))  # type: ignore[no-untyped-call]


class GraphRunner:
    """See `Runner`. A block of each size is captured once; everything that differs between blocks is in device memory."""

    def __init__(self, layers: Layers, buffers: Buffers, sizes: Sequence[int], stream: torch.cuda.Stream) -> None:
        import torch

        self.layers, self.buffers, self.stream = layers, buffers, stream
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._rows = {size: buffers.rows(size) for size in sizes}  # the graphs have their addresses
        torch.cuda.synchronize()  # weights and buffers were filled on other streams
        pool = torch.cuda.graph_pool_handle()
        with torch.no_grad(), exact_products(), torch.cuda.stream(stream):
            for size in sorted(sizes, reverse=True):
                buffers.place.zero_()
                layers.run(self._rows[size])  # warms up: workspaces, modules
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    layers.run(self._rows[size])
                self._graphs[size] = graph
        stream.synchronize()

    def begin(self, token_ids: Sequence[int], start: int) -> None:
        """See `Runner`."""
        import torch

        with torch.cuda.stream(self.stream):
            load_prompt(self.buffers, self.layers.operations, token_ids, start)

    def queue(self, block: Block) -> Callable[[], bool]:
        """See `Runner`."""
        import torch

        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self._graphs[block.size].replay()
            ended.record()
        return ended.query

    def finish(self, first: int, last: int) -> bool:
        """See `Runner`."""
        import torch

        with torch.cuda.stream(self.stream):
            self.layers.operations.store_cache(first, last)
            return not int(self.buffers.overflow)


@contextmanager
def exact_products() -> Iterator[None]:
    """Products sum in float32 to the end: torch may otherwise let cuBLAS add partial sums in binary16."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before
