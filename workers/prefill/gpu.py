"""Prefill beside a monokernel: each size of blocks is one CUDA graph, captured at the start and replayed ever after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.prefill.blocks import BLOCK_SIZES, EXACT_SIZE, PAIRED_FROM, Block
from kog_dist.workers.prefill.buffers import Buffers, Rows, staged
from kog_dist.workers.prefill.cache_layout import CacheLayout
from kog_dist.workers.prefill.device_operations import DeviceOperations, Own, observer
from kog_dist.workers.prefill.exchange import OneRank, Rehearsal, SumExchange
from kog_dist.workers.prefill.layers import Layers
from kog_dist.workers.prefill.matrices import Matrices
from kog_dist.workers.prefill.prefill import Prefill, load_prompt, was_finite
from kog_dist.workers.prefill.tail import Tail

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from kog_dist.workers.cuda.kernel_shape import KernelShape


NO_PAIRS = 1 << 30  # no block is so large


@dataclass(frozen=True)
class Tuning:
    """What decides about speed, not about the function. `kog-bench prefill --choices all` measures others than the defaults."""

    sizes: tuple[int, ...] = BLOCK_SIZES
    paired_from: int = PAIRED_FROM  # blocks of so many rows run two at a time
    library: str = "cublas"  # of the products; or cublaslt
    exact_size: int = EXACT_SIZE  # of the block of a short prompt, not one of `sizes`; 0: none. This one decides about bits
    own: Own = Own.NONE  # products
    stripe: int = 0  # rows of partial sums that are made, and added to the streams, at a time; 0: all


DEFAULT = Tuning()


def is_available() -> bool:
    """Whether there is a torch that can use a GPU; a rank without it takes prompts token by token."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def matrices_for(shape: KernelShape) -> tuple[Matrices, Callable[[str, Any], None]]:
    """An empty collection in the products' type, and the observer that `load_weights` fills it through.

    A rank that hosts all lanes has a head. From here on torch uses the GPU that cupy uses.
    """
    import cupy
    import torch

    torch.cuda.set_device(cupy.cuda.Device().id)
    matrices = Matrices(shape.spec, torch.float16, with_head=shape.num_lanes == shape.spec.num_lanes)
    return matrices, observer(matrices.take, matrices.wants, shape.weight_dtype)


def prefill_for(
    kernel: Monokernel,
    matrices: Matrices,
    *,
    exchange: SumExchange | None = None,
    tuning: Tuning = DEFAULT,
) -> Prefill:
    """Prefill into the KV cache of `kernel`, on its stream; never to be run while a launch of it is under way.

    Takes some hundred ms: compiles or loads the fused kernels, and runs and captures a block of each size, without the peers.
    With an `exchange` blocks do not run in pairs, since its sums are told apart by layer alone. Raises CompileError, LaunchError,
    or ConfigError for a model that it cannot run.
    """
    if exchange is not None:
        tuning = replace(tuning, paired_from=NO_PAIRS)
    runner = runner_for(kernel, matrices, exchange=exchange, tuning=tuning)
    return prefill_by(runner, tuning)


def prefill_by(runner: GraphRunner, tuning: Tuning) -> Prefill:
    """Prefill by a runner that was made for this tuning."""
    return Prefill(
        runner, max_context=runner.layers.spec.max_context, sizes=tuning.sizes, exact_size=tuning.exact_size,
        paired_from=tuning.paired_from,
    )  # fmt: skip


def runner_for(
    kernel: Monokernel,
    matrices: Matrices,
    *,
    exchange: SumExchange | None = None,
    tuning: Tuning = DEFAULT,
) -> GraphRunner:
    """The runner of `prefill_for`."""
    import numpy as np
    import torch

    shape = kernel.shape
    buffers = Buffers(CacheLayout.of(shape), torch.float16, max(tuning.sizes), "cuda")
    embedding = torch.as_tensor(kernel.weights.embedding.view(np.int16), device="cuda")
    cache = torch.as_tensor(kernel.kv.view(np.int16), device="cuda")
    operations = DeviceOperations(
        buffers, embedding, cache, weight_dtype=shape.weight_dtype, kv_dtype=shape.kv_dtype, own=tuning.own
    )
    layers = Layers(shape.spec, matrices.layers(), operations, exchange or OneRank(), stripe=tuning.stripe)
    head = matrices.head()
    stream = torch.cuda.ExternalStream(kernel.stream.ptr)  # type: ignore[no-untyped-call]
    return GraphRunner(layers, buffers, stream, tuning, tail=None if head is None else Tail(layers, buffers, head))


class TwoStreams:
    """See `Together`: the first block's work goes to `stream`, the second one's to another, as long as they run."""

    def __init__(self, stream: torch.cuda.Stream, other: torch.cuda.Stream, num_layers: int) -> None:
        import torch

        self._stream, self._other = stream, other
        self._events = [torch.cuda.Event() for _ in range(num_layers)]  # type: ignore[no-untyped-call]

    @contextmanager
    def first(self) -> Iterator[None]:
        """See `Together`."""
        self._other.wait_stream(self._stream)
        yield

    @contextmanager
    def second(self) -> Iterator[None]:
        """See `Together`."""
        import torch

        with torch.cuda.stream(self._other):
            yield

    def appended(self, layer: int) -> None:
        """See `Together`."""
        self._events[layer].record(self._stream)

    def wait_for(self, layer: int) -> None:
        """See `Together`."""
        self._other.wait_event(self._events[layer])

    def join(self) -> None:
        """See `Together`."""
        self._stream.wait_stream(self._other)


class GraphRunner:
    """See `Runner`. Each size is captured once, alone and as a pair; what differs between blocks is in device memory."""

    def __init__(
        self, layers: Layers, buffers: Buffers, stream: torch.cuda.Stream, tuning: Tuning = DEFAULT, *, tail: Tail | None = None
    ) -> None:
        import torch

        self.layers, self.buffers, self.stream = layers, buffers, stream
        sizes, paired_from = tuning.sizes, tuning.paired_from
        self._other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stored = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by size and number of blocks
        self.tails: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # the same, behind its last block
        self._tail, self._last = tail, (0, 0)
        self._staged_logits = None if tail is None else staged(tail.logits.numel(), torch.float32, is_cuda=tail.logits.is_cuda)
        self._rows = {size: buffers.rows(size) for size in sizes}  # the graphs have their addresses
        if tuning.exact_size:
            self._rows[tuning.exact_size] = buffers.rows(tuning.exact_size, is_exact=True)
        self._second_rows = {size: buffers.rows(size, 1) for size in sizes if size >= paired_from}
        torch.cuda.synchronize()  # weights and buffers were filled on other streams
        pool = torch.cuda.graph_pool_handle()
        with torch.no_grad(), exact_products(tuning.library), torch.cuda.stream(stream):
            for size in sorted(self._rows, reverse=True):
                for count in (1, 2) if size >= paired_from else (1,):
                    buffers.next_start.zero_()
                    self._warm_up(size, count)
                    self.graphs[size, count] = self._captured(partial(self._queue_layers, size, count), pool)
                    if tail is not None:
                        rows = (self._rows if count == 1 else self._second_rows)[size]
                        buffers.last_position.copy_(rows.place[:1])
                        tail.run(rows)
                        self.tails[size, count] = self._captured(partial(tail.run, rows), pool)
        stream.synchronize()

    def _captured(self, queue: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        """What `queue` queues, as a graph; it has run once before."""
        import torch

        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
            queue()
        return graph

    def _warm_up(self, size: int, count: int) -> None:
        """Have all workspaces and modules that a graph needs. Peers may come to this at another time."""
        exchange = self.layers.exchange
        if not exchange.is_alone:
            self.layers.exchange = Rehearsal()
        self._queue_layers(size, count)
        self.layers.exchange = exchange

    def _queue_layers(self, size: int, count: int) -> None:
        """The work of one block or a pair, on the current stream."""
        if count == 1:
            self.layers.run(self._rows[size])
            return
        together = TwoStreams(self.stream, self._other, self.layers.spec.num_layers)
        self.layers.run_pair(self._rows[size], self._second_rows[size], together=together)

    def rows(self, size: int) -> Rows:
        """The memory of a block that runs alone, or of the first one of a pair."""
        return self._rows[size]

    def begin(self, token_ids: Sequence[int], start: int, held: int) -> None:
        """See `Runner`."""
        import torch

        with torch.cuda.stream(self.stream):
            load_prompt(self.buffers, self.layers.operations, token_ids, start, held)

    def queue(self, group: tuple[Block, ...]) -> Callable[[], bool]:
        """See `Runner`."""
        import torch

        ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self.stream):
            self._last = (group[0].size, len(group))
            self.graphs[self._last].replay()
            ended.record()
        return ended.query

    @property
    def has_head(self) -> bool:
        """See `Runner`."""
        return self._tail is not None

    def logits(self) -> NDArray[np.float32]:
        """See `Runner`."""
        assert self._staged_logits is not None
        return self._staged_logits.numpy().copy()

    def store(self, first: int, last: int, *, wants_logits: bool) -> None:
        """See `Runner`."""
        import torch

        with torch.cuda.stream(self.stream):
            if wants_logits and self._tail is not None and self._staged_logits is not None:
                self.tails[self._last].replay()
                self._staged_logits.copy_(self._tail.logits, non_blocking=True)
            self.layers.exchange.share_overflow(self.buffers.overflow)
            self.layers.operations.store_cache(first, last)
            self.buffers.staged_flags.copy_(self.buffers.flags, non_blocking=True)
            self._stored.record()

    def has_ended(self) -> bool:
        """See `Runner`."""
        return bool(self._stored.query())  # type: ignore[no-untyped-call]

    def finish(self) -> bool:
        """See `Runner`."""
        import torch

        self.layers.exchange.check()
        with torch.cuda.stream(self.stream):
            return was_finite(self.buffers, self.buffers.staged_flags[1])

    def stop(self) -> None:
        """See `Runner`."""
        self.layers.exchange.stop()


@contextmanager
def exact_products(library: str) -> Iterator[None]:
    """Products by this library, summed in float32 to the end: torch may otherwise let it add partial sums in binary16."""
    import torch

    matmul, prefer = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library
    before, library_before = matmul.allow_fp16_reduced_precision_reduction, prefer()
    matmul.allow_fp16_reduced_precision_reduction = False
    prefer(library)
    try:
        yield
    finally:
        matmul.allow_fp16_reduced_precision_reduction = before
        prefer(library_before)
