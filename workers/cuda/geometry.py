"""How a thread block of the monokernel divides a product: matrix warps, rows of a tile, registers, bytes under way from memory.

A property of the model, not of the number of ranks: K is split between the matrix warps, and the order of sums must not depend on
how many ranks there are. Chosen by the weights that padding adds (`choose`); what fits into registers is compiled for real models
in tests/unit/test_geometry.py.
"""

from __future__ import annotations

from collections import Counter

from kog_dist.decode.coding import Coding
from kog_dist.decode.plan.recipes import Stage, all_recipes, recipes
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape, op_shape, owned_rows
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass

_LITTLE, _SOME, _MUCH = 0.01, 0.06, 0.1  # of the weights
GATE_AND_UP = 4  # rows that belong together: gate and up of two columns, a word's; thread blocks may own fewer in the last block
SPLITS = (8, 15, 16, 32)
_WHOLE_ROWS = 18  # of a thread block, in a product of lanes with one input
_ADDRESS_REGISTERS = 24  # of attention; found by compiling
_SHORT_HEAD, _LONG_HEAD = 64, 128  # values of a head whose query fits into fewer registers; beyond which it needs more
_SERVICE_WARPS = _ATTEND_WARPS = 4


@dataclass(frozen=True, slots=True)
class Registers:
    """Registers of a thread: at the launch, and after the roles have moved them."""

    launch: int
    matrix: int
    service: int
    attend: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """One way to divide products. `tile_rows`: rows of a tile, or rows times steps where it has several."""

    matrix_warps: int
    tile_rows: int
    most_blocks: float = 1.0  # of rows, by how many are needed: more of them have less padding
    in_flight_bytes: int = 0  # under way from memory at a time; 0: in pieces, by the number of lanes (`RingShape.in_flight`)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a ring slot: the largest tile."""
        return self.matrix_warps * self.tile_rows * STEP_COLUMNS * 2

    @property
    def num_threads(self) -> int:
        """Threads of a thread block."""
        return 32 * (self.matrix_warps + _SERVICE_WARPS + _ATTEND_WARPS)

    def registers(self, num_ranks: int, *, tokens: int = 1, drafts: bool = False, head_dim: int = 128) -> Registers:
        """Those of a build for so many ranks and tokens of a pass. Exchanging with peers costs the finaliser and the sampler
        registers.

        `drafts`: where the sampler goes by drafts. With fewer registers the compiler spills attention's query there, if heads
        have 128 values.
        """
        if self.matrix_warps == 8:
            if head_dim > _LONG_HEAD and num_ranks <= 4:
                return Registers(128, 112, 64, 224) if num_ranks == 2 and tokens == 1 else Registers(128, 104, 64, 240)
            if num_ranks == 2 and tokens == 1:  # the finaliser waits for nobody, and matrix warps keep the stream
                return Registers(128, 112, 64, 224) if drafts else Registers(128, 112, 72, 216)
            if drafts and not (num_ranks == tokens == 1 and head_dim <= _SHORT_HEAD):
                return Registers(128, 104, 64, 240) if num_ranks == 1 or tokens == 1 else Registers(128, 104, 72, 232)
            return Registers(128, 104, 88, 216) if num_ranks <= 4 else Registers(128, 96, 104, 216)
        if num_ranks == 1:
            return Registers(96, 80, 56, 184)
        return Registers(96, 72, 72, 192) if num_ranks <= 4 else Registers(96, 72, 96, 168)

    def op_shape(
        self,
        cta_rows: int,
        num_columns: int,
        multiple: int,
        *,
        has_last: bool = False,
        coding: Coding | None = None,
        slice_steps: int = 1,
    ) -> OpShape:
        """See `tape_packing.op_shape`."""
        return op_shape(
            cta_rows,
            num_columns,
            multiple,
            warps=self.matrix_warps,
            tile_rows=self.tile_rows,
            most_blocks=self.most_blocks,
            leaves_out=self.in_flight_bytes > 0,
            has_last=has_last and self.in_flight_bytes > 0,
            coding=coding,
            slice_steps=slice_steps,
        )


# Twelve warps suit what divides by 384 columns: the 2B shape. Eight have the registers that heads of 128 and long slices of K
# need, and blocks of 32 rows, so that a tile is as large. 48 KB under way are best for every dense shape that was measured
# (docs/history/geometry.md).
TWELVE_WARPS = Geometry(12, 24)
EIGHT_WARPS = Geometry(8, 32, 1.5, 48 * 1024)
FOR_DELTA_NETS = Geometry(8, 32, 1.5, 64 * 1024)  # whose states and longer waits take more (docs/history/delta-nets.md)


def choose(spec: ModelSpec, max_ctas: int, *, is_coded: bool = False) -> Geometry:
    """Of the geometries that have the registers for a model's attention the one that stores fewer padded weights.

    Twelve warps if it makes little difference. Eight for experts, and for weights that are quantised (`is_coded`).
    """
    chosen = _chosen(spec, max_ctas, is_coded=is_coded)
    return FOR_DELTA_NETS if chosen is EIGHT_WARPS and spec.is_recurrent and spec.experts is None else chosen


def _chosen(spec: ModelSpec, max_ctas: int, *, is_coded: bool) -> Geometry:
    if is_coded or any(Kind.CHOICE in recipe.shapes for recipe in all_recipes(spec)):
        return EIGHT_WARPS
    needed = attention_registers(spec.head_dim)
    fitting = [one for one in (TWELVE_WARPS, EIGHT_WARPS) if min(one.registers(n).attend for n in (1, 2, 8)) >= needed] or [
        EIGHT_WARPS
    ]
    return min(fitting, key=lambda one: (round(padding(spec, one, max_ctas) / _LITTLE), one.in_flight_bytes))


def attention_registers(head_dim: int) -> int:
    """Of a thread that has two batches of keys and values, the query and the outputs of a head, and some for addresses."""
    return head_dim + head_dim // 8 + head_dim // 4 + _ADDRESS_REGISTERS


def lanes_together(spec: ModelSpec, stage: Stage, num_lanes: int, num_ctas: int, *, terms: int = 1) -> int:
    """How many of a rank's lanes make one product of a stage: where all have one input, until a thread block has a whole tile.

    A product of few rows costs as much besides its weights as one of many. For gate and up also until FFN columns come in pairs,
    which thread blocks publish as words, without many that are padding. Where rows that are kept are `terms` rows of codes each,
    a thread block has whole ones of them, and padding would be a tenth. So it would be of a delta net's inputs in 16 bit, where
    there are few more rows than a tile has.
    """
    if Kind.STREAM not in stage.reads or not spec.has_one_stream:
        return 1
    rows, together = stage.coded_rows(terms), stage.coded_together(terms)
    most_wasted = _SOME if together > stage.together else _LITTLE if stage.together == GATE_AND_UP else 1.0
    in_tiles = stage.phase is Phase.DELTA_IN and terms == 1
    most_wasted = _MUCH if in_tiles else most_wasted

    def suffices(n: int) -> bool:
        owned = owned_rows(n * rows, num_ctas, together)
        wasted = (_tiled(owned, together) if in_tiles else owned) * num_ctas - n * rows
        return n * rows >= _WHOLE_ROWS * num_ctas and wasted <= most_wasted * n * rows

    return next((n for n in (1, 2, 4, 8) if n < num_lanes and suffices(n)), num_lanes)


def _tiled(owned: int, together: int) -> int:
    """Rows of a thread block's tiles that have `owned` rows and are alike."""
    num_tiles = -(-owned // EIGHT_WARPS.tile_rows)
    return num_tiles * together * -(-owned // (num_tiles * together))


def splits_for(spec: ModelSpec, num_ctas: int) -> int:
    """Splits of the positions: so many that attention to a layer's KV heads keeps as many thread blocks busy as there are.

    No more: all others would wait for a thread block that has two items, one after the other. So gpt-oss with 120 has 15.
    """
    return max(n for n in SPLITS if n == SPLITS[0] or n * spec.num_lanes * spec.lane_kv_heads <= num_ctas)


def padding(spec: ModelSpec, geometry: Geometry, max_ctas: int) -> float:
    """Weights on the tape that are no weights of the model, as a share of these, where one rank hosts all lanes."""
    counted = [(1, spec.vocab_size, spec.hidden_size, 1)]  # how many, rows, columns, what the rows of a block are a multiple of
    for stage, num_layers in Counter(stage for layer in recipes(spec) for recipe in layer for stage in recipe.stages).items():
        if stage.num_rows:
            lanes = lanes_together(spec, stage, spec.num_lanes, max_ctas)
            count = num_layers * spec.num_lanes // lanes
            counted.append((count, lanes * stage.num_rows, stage.num_columns, stage.together))
    real = stored = 0
    for count, num_rows, num_columns, multiple in counted:
        cta_rows, has_last = owned_rows(num_rows, max_ctas, multiple), multiple == GATE_AND_UP
        form = geometry.op_shape(cta_rows, num_columns, multiple, has_last=has_last)
        real, stored = real + count * num_rows * num_columns, stored + count * form.num_values * max_ctas
    return stored / real - 1
