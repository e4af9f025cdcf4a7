"""Prefill beside a monokernel: each size of chunks is one CUDA graph, captured at the start and replayed ever after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kog_dist.cuda import cublas_lt
from kog_dist.cuda.device_array import DeviceArray, DeviceStream
from kog_dist.cuda.driver import Graph, has_ended, launch_graph
from kog_dist.decode.plan.recipes import share_stream
from kog_dist.errors import ConfigError, LaunchError
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.runtime.startup import NOBODY, StartStage, StartTeller
from kog_dist.workers.cuda.head_start import LastStreams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.chunks import (
    CHUNK_SIZES,
    EXACT_SIZE,
    NO_LIMIT,
    SPLIT_SIZE,
    Chunk,
    Work,
    sizes_within,
    work_of,
)
from kog_dist.workers.prefill.base.hopper_abi import HOPPER
from kog_dist.workers.prefill.base.matrices import Matrices, plain_ops
from kog_dist.workers.prefill.buffers.dense import DenseBuffers
from kog_dist.workers.prefill.buffers.lanes import Buffers
from kog_dist.workers.prefill.buffers.prompt import misfit
from kog_dist.workers.prefill.dense.device import DenseDeviceOperations
from kog_dist.workers.prefill.dense.layers import DenseLayers
from kog_dist.workers.prefill.exchange.lane_sums import OneRank, Rehearsal, SumExchange
from kog_dist.workers.prefill.expand.expanded import expanded_on_gpu
from kog_dist.workers.prefill.experts.device import experts_on_gpu
from kog_dist.workers.prefill.lanes.device import DeviceOperations, observer
from kog_dist.workers.prefill.lanes.layers import Layers
from kog_dist.workers.prefill.prefill import Prefill
from kog_dist.workers.prefill.tape.products import products_on_gpu
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape


@dataclass(frozen=True)
class Tuning:
    """What decides about speed, not about the function. `kog-bench prefill --choices all` measures others than the defaults."""

    sizes: tuple[int, ...] = CHUNK_SIZES
    exact_size: int = EXACT_SIZE  # of the chunk of a short prompt, not one of `sizes`; 0: none. This one decides about bits
    split_size: int = SPLIT_SIZE  # of the largest chunk whose streams are sums of two; this one, too

    def within(self, spec: ModelSpec) -> Tuning:
        """The same without chunks that no prompt of the model has. A single stream is float32, and never split."""
        sizes = sizes_within(spec, self.sizes)
        return replace(self, sizes=sizes, exact_size=0, split_size=0) if spec.has_one_stream else replace(self, sizes=sizes)


DEFAULT = Tuning()


def obstacle_on_gpu() -> str:
    """Why prefill cannot run on the current GPU, or without a library; empty if it can."""
    import cupy

    found = divmod(int(cupy.cuda.Device().compute_capability), 10)
    if found != HOPPER:
        return "the GPU has compute capability {}.{}, and prefill is made for {}.{}".format(*found, *HOPPER)
    try:
        cublas_lt.library()
    except LaunchError as error:
        return str(error)
    return ""


def matrices_for(shape: KernelShape) -> tuple[Matrices, Callable[[str, DeviceArray], None]]:
    """An empty collection in the products' type, and the observer that `load_weights` fills it through.

    Where weights of layers are quantised it has routers alone, and what delta nets have in 16 bit: matrices are expanded from the
    monokernel's tape. Experts are not in it.
    """
    is_coded = shape.attention_coding is not None
    first, plain = shape.hosted_lanes[0] == 0, plain_ops(shape.attention_coding)
    matrices = Matrices(shape.spec, np.float16, has_first_lane=first, routers_only=is_coded, plain_ops=plain)
    return matrices, observer(matrices.take, matrices.wants, shape.weight_dtype)


def prefill_for(
    kernel: Monokernel,
    matrices: Matrices,
    *,
    exchange: SumExchange | None = None,
    tuning: Tuning = DEFAULT,
    ended: Callable[[str], None] = lambda step: None,
    tell: StartTeller = NOBODY,
) -> Prefill:
    """Prefill into the KV caches of `kernel`, on its stream; never to be run while a launch of it is under way.

    Takes some hundred ms, and seconds at the first start on a machine: compiles or loads the fused kernels, runs a chunk of each
    size without the peers, for which algorithms of products may have to be chosen, and captures it. `ended` is told each step,
    `tell` what is being done. Raises CompileError, LaunchError, or ConfigError for a model that it cannot run.
    """
    runner = runner_for(kernel, matrices, exchange=exchange, tuning=tuning, ended=ended, tell=tell)
    return prefill_by(runner, tuning)


def prefill_by(runner: GraphRunner, tuning: Tuning) -> Prefill:
    """Prefill by a runner that was made for this tuning."""
    spec = runner.layers.spec
    tuning = tuning.within(spec)
    return Prefill(runner, max_context=spec.max_context, sizes=tuning.sizes, exact_size=tuning.exact_size, work=runner.work)


def runner_for(
    kernel: Monokernel,
    matrices: Matrices,
    *,
    exchange: SumExchange | None = None,
    tuning: Tuning = DEFAULT,
    ended: Callable[[str], None] = lambda step: None,
    tell: StartTeller = NOBODY,
) -> GraphRunner:
    """The runner of `prefill_for`."""
    shape = kernel.shape
    spec, layout = shape.spec, CacheLayout.of(shape)
    if finding := misfit(spec, shape.coding, shape.kv_dtype):
        raise ConfigError(f"prefill cannot run this model: it has {finding}; its prompts go token by token")
    tuning = tuning.within(spec)
    kernel.prepare_head_start()
    ended("head start")
    embedding, cache = kernel.weights.embedding, kernel.kv
    of_layers = matrices.layers()
    if shape.attention_coding is not None:
        of_layers = expanded_on_gpu(shape, kernel.weights, of_layers)
    dtypes = {"weight_dtype": shape.weight_dtype, "kv_dtype": shape.kv_dtype}
    buffers: Buffers | DenseBuffers
    operations: DeviceOperations | DenseDeviceOperations
    layers: Layers | DenseLayers
    if share_stream(spec):
        buffers = DenseBuffers(layout, np.float16, max(tuning.sizes), "cuda", shape.delta)
        of_kernel = kernel.weights.experts
        experts = None if of_kernel is None else experts_on_gpu(shape, of_kernel, buffers.last_position)
        tape = None
        if is_multiplied_on_tape(shape):
            tape = products_on_gpu(shape, kernel.weights, of_layers[0].matrices.places, buffers.last_position)
        states = None if kernel.nets is None else kernel.nets.view(np.float32)
        operations = DenseDeviceOperations(buffers, embedding, cache, **dtypes, experts=experts, tape=tape, states=states)
        layers = DenseLayers(spec, of_layers, operations, exchange or OneRank())
    else:
        buffers = Buffers(layout, np.float16, max(tuning.sizes), "cuda", split_size=tuning.split_size)
        operations = DeviceOperations(buffers, embedding, cache, **dtypes)
        layers = Layers(spec, of_layers, operations, exchange or OneRank())
    ended("kernels of prefill")

    def prepared() -> None:
        import cupy

        products = operations.products
        products.end_trials()
        cupy.get_default_memory_pool().free_all_blocks()  # of trials, and of attention before it had the room that it needs
        ended(f"products, {products.num_tried} of {products.num_shapes} tried,")

    runner = GraphRunner(layers, buffers, kernel.stream, tuning, prepared, tell, work_of(spec, has_rings=layout.has_rings))
    ended("graphs")
    return runner


class GraphRunner:
    """See `Runner`. Each size is captured once as a whole, and once in parts if `work` has any; what differs between chunks is in
    device memory.

    `layers` are a `Layers` with `Buffers`, or a `DenseLayers` with `DenseBuffers`; `stream` is one of cupy's.
    `prepared` is called when a chunk of each size has run, before the first is captured.
    """

    def __init__(
        self,
        layers: Any,
        buffers: Any,
        stream: DeviceStream,
        tuning: Tuning = DEFAULT,
        prepared: Callable[[], None] = lambda: None,
        tell: StartTeller = NOBODY,
        work: Work = NO_LIMIT,
    ) -> None:
        import cupy

        self.layers, self.buffers, self.stream, self.work = layers, buffers, stream, work
        self._make_event = partial(cupy.cuda.Event, disable_timing=True)
        self._stored = self._make_event()
        self.graphs: dict[int, Graph] = {}  # by size
        self.parts: dict[int, list[Graph]] = {}  # by size
        self.ends: dict[int, Graph] = {}  # what is left for the prompt's last token, by the size of its chunk
        self._rows: dict[int, Any] = {size: buffers.rows(size) for size in tuning.sizes}  # the graphs have their addresses
        if tuning.exact_size:
            self._rows[tuning.exact_size] = buffers.rows(tuning.exact_size, is_exact=True)
        self._last = buffers.last_rows()
        cupy.cuda.Device().synchronize()  # weights and buffers were filled on other streams
        largest_first = sorted(self._rows.items(), reverse=True)
        with stream:
            tell.begin(StartStage.PRODUCTS)
            for num_done, (_, rows) in enumerate(largest_first):
                tell.share(num_done / len(largest_first))
                buffers.next_start.fill(0)
                self._warm_up(rows)
            stream.synchronize()
            prepared()
            tell.begin(StartStage.GRAPHS)
            for num_done, (size, rows) in enumerate(largest_first):
                tell.share(num_done / len(largest_first))
                self.ends[size] = self._captured(partial(layers.finish, rows, self._last))
                self.graphs[size] = self._captured(partial(layers.run, rows))
                num_parts = work.parts(size)
                if num_parts > 1:
                    of_parts = [partial(layers.run, rows, part, num_parts) for part in range(num_parts)]
                    self.parts[size] = [self._captured(run) for run in of_parts]
        stream.synchronize()

    def _captured(self, run: Callable[[], object]) -> Graph:
        graph = Graph()
        with graph.captured_from(self.stream.ptr):
            run()
        return graph

    def _warm_up(self, rows: Any) -> None:
        """Have all workspaces and modules that a graph needs. Peers may come to this at another time."""
        exchange = self.layers.exchange
        if not exchange.is_alone:
            self.layers.exchange = Rehearsal()
        self.layers.run(rows)
        self.layers.finish(rows, self._last)
        self.layers.exchange = exchange

    def rows(self, size: int) -> Any:
        """The memory of a chunk: `Rows` or `DenseRows`."""
        return self._rows[size]

    @property
    def is_all_or_nothing(self) -> bool:
        """See `Runner`."""
        return bool(self.layers.is_all_or_nothing)

    def begin(self, token_ids: Sequence[int], start: int, held: int, cache: int = 0) -> None:
        """See `Runner`."""
        self.buffers.staging.load(token_ids, start, self.buffers.max_size, self.stream.ptr, cache)
        if held < start:
            with self.stream:
                self.layers.load_cache(held, start)

    def queue(self, chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        """See `Runner`."""
        graph = self.graphs[chunk.size] if chunk.num_parts == 1 else self.parts[chunk.size][part]
        launch_graph(graph.exec_ptr, self.stream.ptr)
        ended = self._make_event()
        ended.record(self.stream)
        return lambda: has_ended(ended.ptr)

    @property
    def streams(self) -> LastStreams:
        """See `Runner`."""
        streams: LastStreams = self.buffers.streams
        return streams

    def queue_end(self, chunk: Chunk) -> None:
        """See `Runner`."""
        launch_graph(self.ends[chunk.size].exec_ptr, self.stream.ptr)

    def store(self, first: int, last: int) -> None:
        """See `Runner`."""
        with self.stream:
            self.layers.exchange.share_overflow(self.buffers.overflow)
            self.layers.store_cache(first, last)
            self.buffers.staging.read_back(self.stream.ptr)
            self._stored.record(self.stream)

    def has_ended(self) -> bool:
        """See `Runner`."""
        return has_ended(self._stored.ptr)

    def finish(self) -> bool:
        """See `Runner`."""
        self.layers.exchange.check()
        has_overflown = self.buffers.staging.has_overflown
        if has_overflown:
            with self.stream:
                self.buffers.forget()
        return not has_overflown

    def stop(self) -> None:
        """See `Runner`."""
        self.layers.exchange.stop()
