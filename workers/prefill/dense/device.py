"""The operations of a chunk of a model with one residual stream on a GPU: products by cuBLAS, attention of our own,
and the fused kernels of dense.cu for the rest.

All of it is queued on cupy's current stream and reads positions from device memory, so a chunk can be captured once and replayed
for any place in any prompt.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kog_dist.cuda.driver import Kernel
from kog_dist.decode.plan.steps import Phase
from kog_dist.workers.prefill.attention.choice import attention_for
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, DenseRows
from kog_dist.workers.prefill.delta.device import DeltaKernels, delta_on_gpu
from kog_dist.workers.prefill.dense.dense_abi import APPEND_ROWS, DENSE_PARAMS, MAX_THREADS, dense_header, row_threads
from kog_dist.workers.prefill.dense.gates_abi import GATES_PARAMS, gates_header
from kog_dist.workers.prefill.dense.operations import wide_product
from kog_dist.workers.prefill.expand.expanded import ExpandedDenseLayer
from kog_dist.workers.prefill.experts.device import GroupedExperts
from kog_dist.workers.prefill.gemm.cublas_autotune import Products, algorithms_kept
from kog_dist.workers.prefill.tape.products import TapeProducts

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import DenseMatrices

GATES_KERNELS = ("gate_heads", "add_shared", "take_last_mixer")
KERNELS = ("begin", "embed", "append", "store", "lane_sum", "residual", "residual_alone", "swiglu", "take_last", "give_stream")
_LOADING = 264  # thread blocks that bring what the cache holds
_MOST_STORING = 1024


class DenseDeviceOperations:
    """`DenseOperations` on a GPU. The products' type is binary16.

    `embedding` is (vocab, hidden) in `weight_dtype`; `cache` the monokernel's, of which `cache_number` says one, in
    `kv_dtype`. `experts`: None of a model without.
    `tape`: None where matrices are no quantised ones that can be multiplied so. `states`: float32, the monokernel's, of delta
    nets; None of a model without.
    Raises CompileError or LaunchError.
    """

    def __init__(
        self,
        buffers: DenseBuffers,
        embedding: Array,
        cache: Array,
        *,
        weight_dtype: str,
        kv_dtype: str,
        experts: GroupedExperts | None = None,
        tape: TapeProducts | None = None,
        states: Array | None = None,
    ) -> None:
        self.experts, self.tape = experts, tape
        self.buffers, self.spec, self.layout = buffers, buffers.spec, buffers.layout
        cubin = compiled.build("dense", dense_header(self.layout, weight_dtype=weight_dtype, kv_dtype=kv_dtype))
        self.products = Products(algorithms_kept())
        self._bind(embedding, cache, {name: partial(compiled.launch, Kernel(cubin.path, name, 0)) for name in KERNELS})
        self._attention = attention_for(self.layout)
        gates = None
        if self.spec.mixed_layers:
            gates_path = compiled.build("gates", gates_header(self.spec, self.layout.num_lanes, buffers.delta)).path
            gates = {name: partial(compiled.launch, Kernel(gates_path, name, 0)) for name in GATES_KERNELS}
        nets = None if states is None else delta_on_gpu(buffers, states)
        self._bind_mixers(gates, nets)

    def _bind(self, embedding: Array, cache: Array, launchers: Launchers) -> None:
        """`launchers`: see `KernelCalls`."""
        buffers = self.buffers
        arrays = {
            "prompt": buffers.prompt, "next_start": buffers.next_start, "overflow": buffers.overflow, "embedding": embedding,
            "rope": buffers.rope, "keys": buffers.keys, "values": buffers.values, "cache": cache,
            "cache_number": buffers.cache_number, "last_position": buffers.last_position, "last_streams": buffers.last_streams,
        }  # fmt: skip
        self._launch = KernelCalls(DENSE_PARAMS, launchers, arrays)
        self._row_threads = row_threads(self.spec.hidden_size)

    def _bind_mixers(self, gates: Launchers | None, nets: DeltaKernels | None) -> None:
        """What models of several kinds of layers have; `gates`: see `KernelCalls`."""
        arrays = {"last_position": self.buffers.last_position}
        self._gates = None if gates is None else KernelCalls(GATES_PARAMS, gates, arrays)
        self.nets = nets

    def begin(self, rows: DenseRows) -> None:
        """See `DenseOperations`."""
        self._launch("begin", 1, 1, size=rows.size, place=rows.place)

    @property
    def _is_on_tape(self) -> bool:
        """Whether products are `tape`'s. What they multiply is in their order then."""
        return self.tape is not None

    def _on_tape(self, phase: Phase, rows: DenseRows, matrices: DenseMatrices, x: Array, out: Array) -> bool:
        """Queue a product, if it is `tape`'s."""
        if self.tape is None:
            return False
        assert isinstance(matrices, ExpandedDenseLayer)
        self.tape(phase, matrices.layer, rows.size, rows.place, x, out)
        return True

    def embed(self, rows: DenseRows, norm: Array) -> None:
        """See `DenseOperations`."""
        self._launch(
            "embed",
            rows.size,
            self._row_threads,
            place=rows.place,
            stream=rows.stream,
            x=rows.x,
            norm=norm,
            is_ordered=self._is_on_tape,
        )

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """See `Multiplies`."""
        self.products(x, matrix, out)

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """See `DenseOperations`."""
        if not self._on_tape(Phase.QKV, rows, matrices, rows.x, rows.qkv):
            wide_product(self, rows.x, matrices.wqkv, rows.qkv)
        num_row_ctas = -(-rows.size // APPEND_ROWS)
        self._launch(
            "append", num_row_ctas + _LOADING, MAX_THREADS, early=True, size=rows.size, layer=layer, num_row_ctas=num_row_ctas,
            place=rows.place, qkv=rows.qkv, query=rows.query, qkv_bias=matrices.qkv_bias, head_norms=matrices.head_norms,
        )  # fmt: skip
        num_ctas = min(_MOST_STORING, -(-rows.size * self.layout.heads * self.spec.head_dim // (8 * MAX_THREADS)))
        self._launch("store", num_ctas, MAX_THREADS, early=True, size=rows.size, layer=layer, place=rows.place)

    def attend(self, rows: DenseRows, layer: int, sinks: Array | None = None) -> Array:
        """See `DenseOperations`."""
        keys, values, window = self.buffers.keys[0], self.buffers.values[0], self.spec.window(layer)
        return self._attention.run(rows.query, keys, values, rows.place, window, sinks, is_ordered=self._is_on_tape)

    def gate_heads(self, rows: DenseRows, mixed: Array) -> None:
        """See `DenseOperations`."""
        assert self._gates is not None
        num_ctas = min(_MOST_STORING, -(-mixed.size // (2 * MAX_THREADS)))
        self._gates("gate_heads", num_ctas, MAX_THREADS, size=rows.size, qkv=rows.qkv, attended=mixed)

    def recur(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> Array:
        """See `DenseOperations`."""
        assert self.nets is not None
        assert rows.nets is not None
        assert rows.mixed is not None
        wide_product(self, rows.x, matrices.wqkv, rows.nets.projected)
        self.nets.run(rows, matrices, layer)
        return rows.mixed

    def keep_states(self) -> None:
        """See `DenseOperations`."""
        assert self.nets is not None
        self.nets.keep_states()

    def project(self, rows: DenseRows, mixed: Array, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        if not self._on_tape(Phase.OUT, rows, matrices, mixed, rows.partial):
            self.product(mixed, matrices.wo, rows.partial)

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Array, bias: Array | None = None) -> None:
        """See `DenseOperations`."""
        self._launch(
            "lane_sum",
            rows.size,
            self._row_threads,
            early=True,
            size=rows.size,
            scale=scale,
            partial=rows.partial,
            own_sum=own_sum,
            bias=bias,
        )

    def residual(self, rows: DenseRows, scale: float, total: Array | None, norm: Array | None, bias: Array | None = None) -> None:
        """See `DenseOperations`."""
        left = None if rows.experts is None else rows.experts.planes[1]
        self._launch(
            "residual_alone" if total is None else "residual", rows.size, self._row_threads,
            early=total is None,  # else it is not a product alone that comes before
            size=rows.size, scale=scale, stream=rows.stream, x=rows.x, left=left, norm=norm, partial=rows.partial, total=total,
            bias=bias, is_ordered=self._is_on_tape,
        )  # fmt: skip

    def gate(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        if self._on_tape(Phase.GATE_UP, rows, matrices, rows.x, rows.activation):
            return
        w13 = matrices.w13
        assert w13 is not None
        wide_product(self, rows.x, w13, rows.gate_up)
        self._launch(
            "swiglu", rows.size, MAX_THREADS, early=True, size=rows.size, gate_up=rows.gate_up, activation=rows.activation
        )

    def lower(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        if self._on_tape(Phase.DOWN, rows, matrices, rows.activation, rows.partial):
            return
        w2 = matrices.w2
        assert w2 is not None
        self.product(rows.activation, w2, rows.partial)

    def mix(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """See `DenseOperations`."""
        own, router = rows.experts, matrices.router
        assert own is not None
        assert router is not None
        assert self.experts is not None
        self.product(own.planes.reshape(1, 2 * rows.size, -1), router[None], own.logits.reshape(1, 2 * rows.size, -1))
        self.experts.run(rows, own, matrices.router_bias, layer)

    def add_shared(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        own = rows.experts
        assert self._gates is not None
        assert own is not None
        self.gate(rows, matrices)
        w2 = matrices.w2  # behind what `gate` multiplies: both may be expanded in one place
        assert w2 is not None
        self.product(rows.activation, w2, own.shared)
        self._gates(
            "add_shared", rows.size, MAX_THREADS, size=rows.size, x=rows.x, shared_gate=matrices.shared_gate, shared=own.shared,
            partial=rows.partial,
        )  # fmt: skip

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        """See `DenseOperations`."""
        self._launch(
            "take_last", 1, MAX_THREADS, place=rows.place, stream=rows.stream, query=rows.query, last_place=last.place,
            last_stream=last.stream, last_query=last.query,
        )  # fmt: skip
        if self._gates is not None:
            self._gates(
                "take_last_mixer", 1, MAX_THREADS, place=rows.place, qkv=rows.qkv, last_qkv=last.qkv, mixed=rows.mixed,
                last_mixed=last.mixed,
            )  # fmt: skip

    def give_stream(self, last: DenseRows) -> None:
        """See `DenseOperations`."""
        self._launch("give_stream", 1, MAX_THREADS, stream=last.stream)
