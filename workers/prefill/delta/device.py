"""Delta nets of a chunk of tokens on a GPU (delta.cu, rule.cu), queued on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kog_dist.cuda.driver import Kernel
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.delta_blocks import BLOCK, num_blocks
from kog_dist.workers.prefill.base.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.delta.delta_abi import (
    DELTA_PREFILL_PARAMS,
    PREPARED_ROWS,
    WARP_COLUMNS,
    advance_shared_bytes,
    delta_header,
    num_warps,
    solve_shared_bytes,
)
from kog_dist.workers.prefill.delta.state_layout import StateLayout

if TYPE_CHECKING:
    from kog_dist.workers.cuda.delta_shape import DeltaShape
    from kog_dist.workers.prefill.base.matrices import DenseMatrices
    from kog_dist.workers.prefill.buffers.dense import DenseBuffers, DenseRows

DELTA_KERNELS, RULE_KERNELS = ("prepare", "keep_inputs", "norm_heads", "keep_states"), ("solve_blocks", "advance_states")
_THREADS, _SOLVE_THREADS = 256, 128
_MOST_COPYING = 1056  # thread blocks of kernels that copy


def delta_on_gpu(buffers: DenseBuffers, states: Array) -> DeltaKernels:
    """The kernels for a rank's nets; `states`: the monokernel's. Raises CompileError or LaunchError."""
    import cupy

    shape = buffers.delta
    assert shape is not None
    cupy.zeros(1)  # makes a context, if nobody has done so
    header = delta_header(shape, buffers.spec.norm_eps)
    shared_bytes = {"solve_blocks": solve_shared_bytes(shape), "advance_states": advance_shared_bytes(shape)}
    paths = dict.fromkeys(DELTA_KERNELS, compiled.build("delta", header).path)
    paths |= dict.fromkeys(RULE_KERNELS, compiled.build("rule", header).path)
    kernels = {name: Kernel(path, name, shared_bytes.get(name, 0)) for name, path in paths.items()}
    return DeltaKernels(buffers, states, {name: partial(compiled.launch, kernel) for name, kernel in kernels.items()})


class DeltaKernels:
    """What a delta net computes between its two products. `launchers`: see `KernelCalls`."""

    def __init__(self, buffers: DenseBuffers, states: Array, launchers: Launchers) -> None:
        shape, made = buffers.delta, buffers.states
        assert shape is not None
        assert made is not None
        self.shape: DeltaShape = shape
        self._layout = StateLayout(shape)
        arrays = {
            "last_position": buffers.last_position, "overflow": buffers.overflow, "cache_number": buffers.cache_number,
            "states": states, "made": made,
        }  # fmt: skip
        self._launch = KernelCalls(DELTA_PREFILL_PARAMS, launchers, arrays)

    def run(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """From the projected input of a chunk to `mixed`, and to `DenseBuffers.states`."""
        for call in self.calls(rows, matrices, layer).values():
            call()

    def calls(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> dict[str, Callable[[], None]]:
        """What queues each kernel of that, in their order."""
        shape, nets = self.shape, rows.nets
        assert nets is not None
        blocks, lanes, warps = num_blocks(rows.size), shape.num_lanes, num_warps(shape)
        heads = lanes * shape.heads
        arrays: dict[str, Any] = {
            "place": rows.place, "projected": nets.projected, "taps": matrices.delta_taps, "factors": matrices.delta_factors,
            "norm": matrices.delta_norm, "query": nets.query, "key": nets.key, "value": nets.value, "logs": nets.logs,
            "beta": nets.beta, "solved": nets.solved, "seen": nets.seen, "mixed": rows.mixed, "size": rows.size,
            "net": self._layout.net_of(layer),
        }  # fmt: skip
        parts = lanes * (2 * shape.key_heads + shape.heads) + 1
        kept = heads * shape.slices * (shape.net.conv_width - 1) * shape.item_channels
        grids = {
            "prepare": (_ctas(32 * parts * blocks * BLOCK // PREPARED_ROWS), _THREADS),
            "keep_inputs": (min(_MOST_COPYING, _ctas(kept)), _THREADS),
            "solve_blocks": (heads * blocks, _SOLVE_THREADS),
            "advance_states": (heads * shape.net.value_dim // (warps * WARP_COLUMNS), 32 * warps),
            "norm_heads": (_ctas(32 * heads * rows.size), _THREADS),
        }
        return {name: partial(self._launch, name, *grid, **arrays) for name, grid in grids.items()}

    def keep_states(self) -> None:
        """See `DenseOperations`."""
        self._launch("keep_states", min(_MOST_COPYING, _ctas(self._layout.num_values // 4)), _THREADS)


def _ctas(num_threads: int) -> int:
    return -(-num_threads // _THREADS)
