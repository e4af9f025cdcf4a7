"""A chunk's products with quantised matrices that are not expanded first (tape.cu), queued on cupy's current stream."""

from __future__ import annotations

from functools import partial

from kog_dist.cuda.driver import Kernel
from kog_dist.decode.steps import Phase
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.prefill import compiled
from kog_dist.workers.prefill.arrays import Array, address, library_of
from kog_dist.workers.prefill.expand.expanded import places_on_tape
from kog_dist.workers.prefill.kernel_calls import KernelCalls, Launchers
from kog_dist.workers.prefill.tape.tape_abi import PHASES, TAPE_PARAMS, matrix_rows, tape_header, tiles
from kog_dist.workers.prefill.tape.tile_abi import TILE_THREADS, TapeTile, num_across

MOST_ROWS = 512  # of a chunk that is multiplied so; larger ones are not slower with expanded matrices (docs/history/quantised.md)


def kernel_bytes(shape: KernelShape) -> dict[str, int]:
    """The kernels, and the shared memory that each asks for."""
    return {f"{name}_{tile.rows}": tile.shared_bytes for name, _ in PHASES.values() for tile in tiles(shape)}


def products_on_gpu(shape: KernelShape, weights: DeviceWeights, last_position: Array) -> TapeProducts:
    """Those of a monokernel. Raises CompileError or LaunchError."""
    path = compiled.build("tape", tape_header(shape)).path
    launchers = {name: partial(compiled.launch, Kernel(path, name, size)) for name, size in kernel_bytes(shape).items()}
    return TapeProducts(shape, weights, last_position, launchers)


class TapeProducts:
    """Products by phase and layer. `weights` are the monokernel's; `last_position`: int32, of the prompt's last token.
    `launchers`: see `KernelCalls`.
    """

    def __init__(self, shape: KernelShape, weights: DeviceWeights, last_position: Array, launchers: Launchers) -> None:
        self.most_rows, self._tiles, self._phases = MOST_ROWS, tiles(shape), list(shape.ops)
        self._places = library_of(last_position).asarray(places_on_tape(shape))
        self._tape = weights.tape
        self._num_tiles = {
            phase: shape.num_lanes // shape.lanes_of(phase) * num_across(shape.ops[phase], matrix_rows(shape, phase))
            for phase in PHASES
        }
        self._launch = KernelCalls(TAPE_PARAMS, launchers, {"tape": self._tape, "last_position": last_position})
        self._scales = address(self._tape) + 2 * shape.num_ctas * shape.tape_values

    def __call__(self, phase: Phase, layer: int, size: int, place: Array, x: Array, out: Array) -> None:
        """What a chunk of `size` rows gives, of which the first stands at `place`: `x` and `out` are those of `DenseRows`."""
        tile = self.tile_for(size)
        num_ctas = self._num_tiles[phase] * -(-size // tile.rows)
        self._launch(
            f"{PHASES[phase][0]}_{tile.rows}", num_ctas, TILE_THREADS, early=True, size=size, place=place, x=x, out=out,
            places=self._places[layer, self._phases.index(phase)], scales_ptr=self._scales,
        )  # fmt: skip

    def tile_for(self, size: int) -> TapeTile:
        """The smallest of which two have room for a chunk, or the largest. It does not decide about bits.

        Of two, the second has nothing to do where a chunk holds few tokens.
        """
        return next((tile for tile in self._tiles if size <= 2 * tile.rows), self._tiles[-1])
