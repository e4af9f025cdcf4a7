"""Experts on a GPU: experts.cu, queued on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.workers.cuda.expert_weights import DeviceExperts
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.buffers.experts import ExpertRows
from kog_dist.workers.prefill.experts.experts_abi import (
    EXPERTS_PARAMS,
    SORT_THREADS,
    experts_header,
    tile_for,
    tiles,
)
from kog_dist.workers.prefill.tape.tile_abi import PAIR, MakeMap, TapeTile, pairs_across

if TYPE_CHECKING:
    from kog_dist.workers.prefill.buffers.dense import DenseRows

ROW_THREADS = 256  # of thread blocks that have rows
OF_ROWS = ("choose", "sort", "gather", "combine")


def products(shape: KernelShape) -> dict[str, TapeTile]:
    """The kernels of products, and the tiles of each."""
    assert shape.experts is not None
    return {f"{name}_{tile.rows}": tile for name in ("gate_up", "down") for tile in tiles(shape.experts)}


def kernel_bytes(shape: KernelShape) -> dict[str, int]:
    """The kernels, and the shared memory that each asks for."""
    return dict.fromkeys(OF_ROWS, 0) | {name: tile.shared_bytes for name, tile in products(shape).items()}


def experts_on_gpu(shape: KernelShape, weights: DeviceExperts, last_position: Array) -> GroupedExperts:
    """Those of a monokernel. Raises CompileError or LaunchError."""
    path = compiled.build("experts", experts_header(shape)).path
    kernels = {name: Kernel(path, name, size) for name, size in kernel_bytes(shape).items()}
    launchers = {name: partial(compiled.launch, kernel) for name, kernel in kernels.items()}
    at_once = {name: kernels[name].clusters_at_once(PAIR, tile.num_threads) for name, tile in products(shape).items()}
    return GroupedExperts(shape, weights, last_position, launchers, at_once, tensor_map)


class GroupedExperts:
    """What a layer's experts add to the stream (`DenseOperations.mix`), behind the router's product.

    `weights` are the monokernel's; `last_position`: int32, of the prompt's last token. `launchers`: see `KernelCalls`.
    `pairs_at_once`: of thread blocks, that a GPU runs, by the product. `make_map`: as `tensor_map`.
    """

    def __init__(
        self,
        shape: KernelShape,
        weights: DeviceExperts,
        last_position: Array,
        launchers: Launchers,
        pairs_at_once: Mapping[str, int],
        make_map: MakeMap,
    ) -> None:
        spec, own = shape.spec, shape.experts
        assert spec.experts is not None
        assert own is not None
        self._numbers, self._weights, self._first_lane, self._tiles = spec.experts, weights, shape.hosted_lanes[0], tiles(own)
        self._own, self._gates, self._downs = own, 2 * shape.num_lanes * spec.lane_ffn, (shape.num_lanes, spec.hidden_size)
        self._at_once, self._make_map = pairs_at_once, make_map
        self._launch = KernelCalls(EXPERTS_PARAMS, launchers, {"last_position": last_position})

    def run(self, rows: DenseRows, own: ExpertRows, router_bias: Array | None, layer: int) -> None:
        """partial = what the chosen experts of each row give, by the logits in `own`."""
        for call in self.calls(rows, own, router_bias, layer).values():
            call()

    def calls(self, rows: DenseRows, own: ExpertRows, router_bias: Array | None, layer: int) -> dict[str, Callable[[], None]]:
        """The launches that `run` consists of, in order, by kernel."""
        weights, chosen = self._weights, self._numbers.per_token
        down_bias = None if weights.down_bias is None or self._first_lane else weights.down_bias[layer]
        arrays = {
            "place": rows.place, "x": rows.x, "operands": own.operands, "tiles": own.tiles,
            "logits": own.logits, "router_bias": router_bias, "chosen": own.chosen,
            "weights": own.weights, "places": own.places, "offsets": own.offsets,
            "experts": weights.matrices[layer], "activation": own.activation, "result": own.result, "partial": rows.partial,
            "gate_up_bias": None if weights.gate_up_bias is None else weights.gate_up_bias[layer], "down_bias": down_bias,
        }  # fmt: skip
        num_pairs, num_experts = rows.size * chosen, self._numbers.num_experts
        tile = tile_for(num_pairs, num_experts, self._tiles)
        most_tiles = min(num_pairs // tile.rows + num_experts, num_pairs)

        def ctas(product: str, across: int) -> int:  # they stay, and take tiles in turn
            return PAIR * min(most_tiles * across, self._at_once[product])

        gate_up, down, (num_lanes, width) = f"gate_up_{tile.rows}", f"down_{tile.rows}", self._downs
        num_gate_up = ctas(gate_up, pairs_across(self._own.gate_up, self._gates, tile))
        num_down = ctas(down, num_lanes * pairs_across(self._own.down_of_one, width, tile))
        maps = [tile.rows_map(x, self._make_map) for x in (own.operands[None], own.activation.swapaxes(0, 1))]
        return {
            kernel: partial(
                self._launch,
                kernel,
                num_ctas,
                num_threads,
                early=True,
                size=rows.size,
                first_lane=self._first_lane,
                tile_rows=tile.rows,
                least=tile.least,
                rows_map=rows_map,
                **arrays,
            )
            for kernel, num_ctas, num_threads, rows_map in (
                ("choose", -(-rows.size // (ROW_THREADS // 32)), ROW_THREADS, None),
                ("sort", num_experts, SORT_THREADS, None),
                ("gather", 1 + rows.size, ROW_THREADS, None),
                (gate_up, num_gate_up, tile.num_threads, maps[0]),
                (down, num_down, tile.num_threads, maps[1]),
                ("combine", rows.size, ROW_THREADS, None),
            )
        }
