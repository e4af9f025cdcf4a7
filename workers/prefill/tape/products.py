"""A chunk's products with quantised matrices that are not expanded first (tape.cu), queued on cupy's current stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.cuda.driver import Kernel, tensor_map
from kog_dist.decode.steps import Phase
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill import compiled
from kog_dist.workers.prefill.arrays import Array, address
from kog_dist.workers.prefill.kernel_calls import Launchers
from kog_dist.workers.prefill.tape.tape_abi import PAIR, PHASES, TAPE_PARAMS, matrix_rows, tape_header, tiles
from kog_dist.workers.prefill.tape.tile_abi import TILE_THREADS, TapeTile, num_across

MOST_ROWS = 1024  # of a chunk that is multiplied so; larger ones are not slower expanded (docs/history/quantised.md)
PANEL = 64  # columns that stand together in shared memory
MakeMap = Callable[[int, Sequence[int], Sequence[int], Sequence[int]], NDArray[np.uint64]]


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
        self, shape: KernelShape, weights: DeviceWeights, places: Array, last_position: Array, launchers: Launchers,
        make_map: MakeMap,
    ) -> None:  # fmt: skip
        self.most_rows, self._tiles, self._phases = MOST_ROWS, tiles(shape), list(shape.ops)
        self._tape, self._places = weights.tape, places
        self._num_tiles = {
            phase: shape.num_lanes
            // shape.lanes_of(phase)
            * -(-num_across(shape.ops[phase], matrix_rows(shape, phase)) // PAIR)
            * PAIR
            for phase in PHASES
        }
        self._launchers, self._make_map, self._last_position = launchers, make_map, last_position
        self._scales_ptr = address(self._tape) + 2 * shape.num_ctas * shape.tape_values

    def __call__(self, phase: Phase, layer: int, size: int, place: Array, x: Array, out: Array) -> None:
        """What a chunk of `size` rows gives, of which the first stands at `place`. `x` (size, columns) or (lanes, size, columns)
        and `out` are those of `DenseRows`.
        """
        tile = self.tile_for(size)
        params: Any = np.zeros((), TAPE_PARAMS.dtype)
        params["rows_map"] = self._map(x if x.ndim == 3 else x[None], tile)
        params["tape_ptr"], params["scales_ptr"] = address(self._tape), self._scales_ptr
        params["places_ptr"] = address(self._places[layer, self._phases.index(phase)])
        params["place_ptr"], params["last_position_ptr"] = address(place), address(self._last_position)
        params["out_ptr"], params["size"] = address(out), size
        num_ctas = self._num_tiles[phase] * -(-size // tile.rows)
        self._launchers[f"{PHASES[phase][0]}_{tile.rows}"](num_ctas, TILE_THREADS, params.tobytes(), True)

    def _map(self, x: Array, tile: TapeTile) -> NDArray[np.uint64]:
        lanes, size, columns = x.shape
        row_bytes, lane_bytes = x.strides[1], x.strides[0] if lanes > 1 else size * x.strides[1]
        strides = (row_bytes, lane_bytes, lanes * lane_bytes)
        return self._make_map(address(x), (columns, size, lanes, 1), strides, (PANEL, tile.least // PAIR, 1, 1))

    def tile_for(self, size: int) -> TapeTile:
        """Of those with the fewest rows beside a chunk's the one with the longest stages, else the largest. It does not decide
        about bits.

        For a small chunk it is two of the smallest, of which the second has nothing to do where there are few tokens.
        """
        smallest = self._tiles[0]
        if size <= 2 * smallest.rows:
            return smallest
        return min(self._tiles[1:], key=lambda tile: (-(-size // tile.rows) * tile.rows, -tile.stage_columns, -tile.rows))
