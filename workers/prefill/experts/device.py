"""Experts on a GPU: experts.cu, queued on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.cuda.driver import Kernel
from kog_dist.workers.cuda.expert_weights import DeviceExperts
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill import compiled
from kog_dist.workers.prefill.arrays import Array
from kog_dist.workers.prefill.experts.experts_abi import (
    EXPERTS_PARAMS,
    SORT_THREADS,
    experts_header,
    tile_for,
    tiles,
)
from kog_dist.workers.prefill.experts.rows import ExpertRows
from kog_dist.workers.prefill.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.tape.tile_abi import TILE_THREADS, num_across

if TYPE_CHECKING:
    from kog_dist.workers.prefill.dense.buffers import DenseRows

ROW_THREADS = 256  # of thread blocks that have rows


def kernel_bytes(shape: KernelShape) -> dict[str, int]:
    """The kernels, and the shared memory that each asks for."""
    assert shape.experts is not None
    of_tiles = {f"{name}_{tile.rows}": tile.shared_bytes for name in ("gate_up", "down") for tile in tiles(shape.experts)}
    return {"choose": 0, "sort": 0, "combine": 0} | of_tiles


def experts_on_gpu(shape: KernelShape, weights: DeviceExperts, last_position: Array) -> GroupedExperts:
    """Those of a monokernel. Raises CompileError or LaunchError."""
    path = compiled.build("experts", experts_header(shape)).path
    launchers = {name: partial(compiled.launch, Kernel(path, name, size)) for name, size in kernel_bytes(shape).items()}
    return GroupedExperts(shape, weights, last_position, launchers)


class GroupedExperts:
    """What a layer's experts add to the stream (`DenseOperations.mix`), behind the router's product.

    `weights` are the monokernel's; `last_position`: int32, of the prompt's last token. `launchers`: see `KernelCalls`.
    """

    def __init__(self, shape: KernelShape, weights: DeviceExperts, last_position: Array, launchers: Launchers) -> None:
        spec, own = shape.spec, shape.experts
        assert spec.experts is not None
        assert own is not None
        self._numbers, self._weights, self._first_lane, self._tiles = spec.experts, weights, shape.hosted_lanes[0], tiles(own)
        self._gates = num_across(own.gate_up, 2 * shape.num_lanes * spec.lane_ffn)
        self._downs = num_across(own.down_of_one, spec.hidden_size)
        self._launch = KernelCalls(EXPERTS_PARAMS, launchers, {"last_position": last_position})

    def run(self, rows: DenseRows, own: ExpertRows, router_bias: Array | None, layer: int) -> None:
        """partial = what the chosen experts of each row give, by the logits in `own`."""
        for call in self.calls(rows, own, router_bias, layer).values():
            call()

    def calls(
        self, rows: DenseRows, own: ExpertRows, router_bias: Array | None, layer: int
    ) -> dict[str, Callable[[], None]]:  # fmt: skip
        """The launches that `run` consists of, in order, by kernel."""
        weights, chosen = self._weights, self._numbers.per_token
        down_bias = None if weights.down_bias is None or self._first_lane else weights.down_bias[layer]
        arrays = {
            "place": rows.place, "x": rows.x, "operands": own.operands,
            "logits": own.logits, "router_bias": router_bias, "chosen": own.chosen,
            "weights": own.weights, "places": own.places, "pair_rows": own.pair_rows, "offsets": own.offsets,
            "experts": weights.matrices[layer], "activation": own.activation, "result": own.result, "partial": rows.partial,
            "gate_up_bias": None if weights.gate_up_bias is None else weights.gate_up_bias[layer], "down_bias": down_bias,
        }  # fmt: skip
        num_pairs, num_experts = rows.size * chosen, self._numbers.num_experts
        tile = tile_for(num_pairs, num_experts, self._tiles)
        num_slots = num_pairs // tile.rows + num_experts  # see `find_share` in experts.cu
        return {
            kernel: partial(
                self._launch, kernel, num_ctas, num_threads, early=True, size=rows.size, first_lane=self._first_lane, **arrays
            )
            for kernel, num_ctas, num_threads in (
                ("choose", -(-rows.size // (ROW_THREADS // 32)), ROW_THREADS),
                ("sort", num_experts, SORT_THREADS),
                (f"gate_up_{tile.rows}", num_slots * self._gates, TILE_THREADS),
                (f"down_{tile.rows}", num_slots * self._downs, TILE_THREADS),
                ("combine", rows.size, ROW_THREADS),
            )
        }
