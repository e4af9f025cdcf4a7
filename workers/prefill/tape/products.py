"""A chunk's products with quantised matrices that are not expanded first (tape.cu), queued on cupy's current stream."""

from __future__ import annotations

import heapq
from functools import partial

import numpy as np

from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.decode.plan.steps import LAYER_OPS, Phase
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill.base import compiled
from kog_dist.workers.prefill.base.arrays import Array, address
from kog_dist.workers.prefill.base.kernel_calls import Launchers
from kog_dist.workers.prefill.tape.tape_abi import PHASES, TAPE_PARAMS, pairs_of, tape_header, tiles
from kog_dist.workers.prefill.tape.tile_abi import PAIR, MakeMap, TapeTile

_BESIDE = 128  # see `_time`


def kernel_bytes(shape: KernelShape) -> dict[str, int]:
    """The kernels, and the shared memory that each asks for."""
    return {f"{name}_{tile.rows}": tile.shared_bytes for name, _ in PHASES.values() for tile in tiles(shape)}


def products_on_gpu(shape: KernelShape, weights: DeviceWeights, places: Array, last_position: Array) -> TapeProducts:
    """Those of a monokernel. Raises CompileError or LaunchError."""
    path = compiled.build("tape", tape_header(shape)).path
    launchers = {name: partial(compiled.launch, Kernel(path, name, size)) for name, size in kernel_bytes(shape).items()}
    return TapeProducts(shape, weights, places, last_position, launchers, tensor_map)


class TapeProducts:
    """Products by phase and layer. `weights` are the monokernel's, `places` those of `ExpandedMatrices`.

    `last_position`: int32, of the prompt's last token. `launchers`: see `KernelCalls`. `make_map`: as `tensor_map`.
    """

    def __init__(
        self,
        shape: KernelShape,
        weights: DeviceWeights,
        places: Array,
        last_position: Array,
        launchers: Launchers,
        make_map: MakeMap,
    ) -> None:
        self._tiles = tiles(shape)
        self._tape, self._places = weights.tape, places
        self._num_products = {phase: shape.num_lanes // shape.lanes_of(phase) for phase in PHASES}
        self._across = {phase: num * pairs_of(shape, phase) for phase, num in self._num_products.items()}
        self._pairs_at_once = max(shape.num_ctas // PAIR, 1)  # of one thread block on a multiprocessor
        self._launchers, self._make_map, self._last_position = launchers, make_map, last_position
        self._scales_ptr = address(self._tape) + 2 * shape.num_ctas * shape.tape.num_values

    def __call__(self, phase: Phase, layer: int, size: int, place: Array, x: Array, out: Array) -> None:
        """What a chunk of `size` rows gives, of which the first stands at `place`. `x` (size, columns) or (lanes, size, columns)
        and `out` are those of `DenseRows`.
        """
        tile, tile_rows = self.tile_for(phase, size)
        params = np.zeros((), TAPE_PARAMS.dtype)
        params["rows_map"] = tile.rows_map(x if x.ndim == 3 else x[None], self._make_map)
        params["tape_ptr"], params["scales_ptr"] = address(self._tape), self._scales_ptr
        params["places_ptr"] = address(self._places[layer, LAYER_OPS.index(phase)])
        params["place_ptr"], params["last_position_ptr"] = address(place), address(self._last_position)
        params["out_ptr"], params["size"], params["tile_rows"] = address(out), size, tile_rows
        num_pairs = self._across[phase] * -(-size // tile_rows)
        params["num_pairs"], params["products"] = num_pairs, self._num_products[phase]
        num_ctas = PAIR * (min(num_pairs, self._pairs_at_once) if tile.ctas == 1 else num_pairs)
        self._launchers[f"{PHASES[phase][0]}_{tile.rows}"](num_ctas, tile.num_threads, params.tobytes(), True)

    def tile_for(self, phase: Phase, size: int) -> tuple[TapeTile, int]:
        """Tiles for a chunk's product, and rows of each but the last. They do not decide about bits.

        For a small chunk it is two of the smallest, of which the second has nothing to do where there are few tokens.
        """
        smallest, largest = self._tiles
        if size <= 2 * smallest.rows:
            return smallest, smallest.rows
        choices = range(largest.rows, 0, -largest.least)
        return largest, min(choices, key=lambda rows: _time(rows, size, self._across[phase], self._pairs_at_once))


def _time(tile_rows: int, size: int, across: int, num_pairs: int) -> int:
    """Of a product in tiles of so many rows, `across` pairs of them next to each other, where so many pairs run at once. In rows:
    what else a tile does takes as long as _BESIDE.
    """
    ends = [0] * num_pairs
    for rows in [tile_rows] * (size // tile_rows * across) + [size % tile_rows] * (across if size % tile_rows else 0):
        heapq.heapreplace(ends, ends[0] + rows + _BESIDE)
    return max(ends)
