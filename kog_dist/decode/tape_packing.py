"""The physical form of weight tapes: how a matrix becomes the stream that each thread block of the monokernel reads.

A product y = W x is cut by rows over the thread blocks, and within one by columns over its matrix warps. The tape of a thread
block holds, for each block of rows (at most 32: a finaliser warp has a thread for each), tiles in the order of use; a tile holds,
for each warp, a few steps of 32 columns, each step row by row: [block][tile][warp][step][row][32]. Of each eight neighbouring
columns the tape holds 0 1 4 5 2 3 6 7: the order of the registers that one thread gives to the matrix unit. Rows and columns that
do not divide are filled with zeros; warps that have no column at all in a tile may be left out of it (`OpShape.real_steps`).

The tapes of all thread blocks are one array, [product][tile][thread block]: what they read at about the same time lies together.

The functions take numpy or cupy arrays of any 16-bit type and return the same kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kog_dist.decode.coding import Coding
from kog_dist.records import dataclass

STEP_COLUMNS = 32  # columns that one mma takes of eight rows
_STEP = (4, 2, 2, 2)  # a step's columns: threads, halves (upper and lower rows of the operand), pairs, columns of a pair
MAX_PIECES = 4  # of a tile in each warp: eight rows and 32 columns, what one mma takes

AnyArray = Any  # numpy.ndarray or cupy.ndarray


@dataclass(frozen=True, slots=True)
class OpShape:
    """One matrix-vector product in one thread block: see `Op` in phases/layout.cuh, which has the same formulas."""

    rows: int  # of a block
    blocks: int
    per: int  # steps of 32 columns for each matrix warp
    steps: int  # of them in one tile
    warps: int  # matrix warps, which share the columns
    real_steps: int = 0  # that hold columns, of all warps; what the last warps have beyond them is left out. 0: nothing is
    last_rows: int = 0  # of the last block, where it has fewer than the others; 0: as many
    coding: Coding | None = None  # of a quantised matrix: its steps have more columns (coded_packing.py)
    in_turn: bool = False  # warps take parts of the columns, `steps` each, in turn; else each has neighbouring ones

    @property
    def cta_rows(self) -> int:
        """Rows that a thread block owns, padding included."""
        return self.rows * (self.blocks - 1) + self.rows_of(self.blocks - 1)

    def rows_of(self, block: int) -> int:
        """Rows of a block."""
        return self.last_rows if self.last_rows and block == self.blocks - 1 else self.rows

    @property
    def tiles(self) -> int:
        """Tiles of one block of rows."""
        return self.per // self.steps

    @property
    def num_tiles(self) -> int:
        """Tiles of all blocks of rows."""
        return self.blocks * self.tiles

    @property
    def num_columns(self) -> int:
        """K with its padding."""
        return self.per * self.warps * self.step_columns

    @property
    def step_columns(self) -> int:
        """Columns of a step."""
        return STEP_COLUMNS if self.coding is None else self.coding.columns

    @property
    def x_steps(self) -> int:
        """Steps of 32 columns of x for each matrix warp."""
        return self.per * self.step_columns // STEP_COLUMNS

    def part_values(self, rows: int) -> int:
        """16-bit words of a warp's part of a tile of so many rows."""
        return rows * self.steps * STEP_COLUMNS if self.coding is None else self.steps * self.coding.part_bytes(rows) // 2

    def warps_of(self, tile: int) -> int:
        """Warps that have a part of a tile of a block: of the last ones it may have nothing."""
        if self.in_turn:
            return min(self.warps, self.real_steps // self.steps - tile * self.warps)
        return min(self.warps, -(-(self.real_steps - tile) // self.per)) if self.real_steps else self.warps

    @property
    def num_long_tiles(self) -> int:
        """Tiles of a block, the first ones, that have as many warps' parts as the first.

        The others have one part less; where warps take parts in turn it is the last tile, which has what is left.
        """
        return sum(self.warps_of(tile) == self.warps_of(0) for tile in range(self.tiles))

    @property
    def num_values(self) -> int:
        """Weights on the tape of one thread block: 16-bit words."""
        return sum(self.tile_sizes)

    @property
    def tile_values(self) -> int:
        """Weights in one tile of one thread block, with the parts of all warps: 16-bit words."""
        return self.warps * self.part_values(self.rows)

    @property
    def tile_sizes(self) -> list[int]:
        """Weights of each tile on the tape of one thread block."""
        parts = [self.part_values(self.rows_of(block)) for block in range(self.blocks)]
        return [part * self.warps_of(tile) for part in parts for tile in range(self.tiles)]


def op_shape(
    cta_rows: int, num_columns: int, multiple: int, *, warps: int, tile_rows: int, most_blocks: float, leaves_out: bool = False,
    has_last: bool = False, coding: Coding | None = None, slice_steps: int = 1,
) -> OpShape:  # fmt: skip
    """Shape for at least `cta_rows` rows of `num_columns` values; the rows of a block are a multiple of `multiple`.

    `tile_rows`: most rows of a block, and of rows times steps of a tile with several steps. Of the numbers of blocks that are
    needed, and up to `most_blocks` times as many, the first with the fewest rows. `leaves_out`: parts of warps without columns,
    where a tile has one step. `has_last`: the last block may have fewer rows; then there are as few blocks as possible.
    `coding`: of a quantised matrix, whose tiles have one step. `slice_steps`: a warp's columns are a multiple of so many steps.
    """
    fewest = -(-cta_rows // tile_rows)
    blocks = (
        fewest
        if has_last
        else min(
            range(fewest, int(fewest * most_blocks) + 1), key=lambda blocks: blocks * _block_rows(cta_rows, blocks, multiple)
        )
    )
    rows = _block_rows(cta_rows, blocks, multiple)
    blocks, last_rows = -(-cta_rows // rows), (cta_rows - 1) % rows + 1 if has_last and cta_rows % rows else 0
    columns = STEP_COLUMNS if coding is None else coding.columns
    per = -(-num_columns // (warps * columns * slice_steps)) * slice_steps
    groups = -(-rows // 8)
    steps = (
        1
        if coding is not None
        else max(
            s for s in range(1, per + 1) if per % s == 0 and (s == 1 or (s * rows <= tile_rows and s * groups <= MAX_PIECES))
        )
    )
    real_steps = -(-num_columns // columns)
    left_out = leaves_out and steps == 1 and real_steps < per * warps
    return OpShape(rows, blocks, per, steps, warps, real_steps if left_out else 0, last_rows, coding)


def _block_rows(cta_rows: int, blocks: int, multiple: int) -> int:
    return -(-cta_rows // (blocks * multiple)) * multiple


def owned_rows(num_rows: int, num_ctas: int, multiple: int) -> int:
    """Rows of each thread block, a multiple of `multiple`; the last ones may own fewer, or none."""
    return -(-num_rows // (num_ctas * multiple)) * multiple


def interleave(gate: AnyArray, up: AnyArray) -> AnyArray:
    """Rows of gate and up (F, K) in turn (2F, K), so that the two rows of an FFN column have one owner."""
    both = np.stack([gate, up], axis=1)
    return both.reshape(-1, gate.shape[1])


def put_on_tape(tape: AnyArray, position: int, shape: OpShape, tiles: AnyArray) -> None:
    """Write the tiles (num_tiles, num_ctas, tile_values) of a product to the tapes (values,) of all thread blocks.

    `position`: values of one thread block's tape that come before it.
    """
    num_ctas = tiles.shape[1]
    for view, tile in zip(_places(tape, position, shape, num_ctas), tiles, strict=True):
        view[:] = _whole(tile, shape)[:, : view.shape[1], :, : view.shape[3]]


def take_off_tape(tape: AnyArray, position: int, shape: OpShape, num_ctas: int) -> AnyArray:
    """The tiles (num_tiles, num_ctas, tile_values) that `put_on_tape` has written, with zeros for what it left out."""
    tiles = np.zeros_like(tape, shape=(shape.num_tiles, num_ctas, shape.tile_values))
    for view, tile in zip(_places(tape, position, shape, num_ctas), tiles, strict=True):
        _whole(tile, shape)[:, : view.shape[1], :, : view.shape[3]] = view
    return tiles


def _places(tape: AnyArray, position: int, shape: OpShape, num_ctas: int) -> Iterator[AnyArray]:
    """Views (num_ctas, warps, steps, rows, columns of a step) of a product's tiles."""
    first = position * num_ctas
    for i, size in enumerate(shape.tile_sizes):
        block, tile = divmod(i, shape.tiles)
        parts = (shape.warps_of(tile), shape.steps, shape.rows_of(block), STEP_COLUMNS)
        yield tape[first : first + size * num_ctas].reshape(num_ctas, *parts)
        first += size * num_ctas


def _whole(tile: AnyArray, shape: OpShape) -> AnyArray:
    """View of a tile (num_ctas, tile_values) like those of `_places`."""
    return tile.reshape(len(tile), shape.warps, shape.steps, shape.rows, STEP_COLUMNS)


def pack(matrix: AnyArray, shape: OpShape, num_ctas: int) -> AnyArray:
    """The tiles (num_tiles, num_ctas, tile_values) of a matrix (rows, K), 16 bit. Raises ValueError if it is too large."""
    rows, columns = matrix.shape
    if rows > num_ctas * shape.cta_rows or columns > shape.num_columns:
        raise ValueError(
            f"a matrix of {rows} x {columns} does not fit {num_ctas} thread blocks of {shape.cta_rows} rows and "
            f"{shape.num_columns} columns"
        )
    padded = np.zeros_like(matrix, shape=(num_ctas, shape.blocks * shape.rows, shape.num_columns))
    whole = rows // shape.cta_rows  # thread blocks that have all their rows
    padded[:whole, : shape.cta_rows, :columns] = matrix[: whole * shape.cta_rows].reshape(whole, shape.cta_rows, columns)
    if rest := rows - whole * shape.cta_rows:
        padded[whole, :rest, :columns] = matrix[whole * shape.cta_rows :]
    parts = padded.reshape(num_ctas, shape.blocks, shape.rows, shape.warps, shape.tiles, shape.steps, *_STEP)
    # block, tile, thread block, warp, step, row, column (4)
    return parts.transpose(1, 4, 0, 3, 5, 2, 6, 8, 7, 9).reshape(shape.num_tiles, num_ctas, shape.tile_values)


def unpack(tiles: AnyArray, shape: OpShape, num_rows: int, num_columns: int) -> AnyArray:
    """The inverse of `pack`: the matrix (num_rows, num_columns), without its padding."""
    num_ctas = tiles.shape[1]
    parts = tiles.reshape(shape.blocks, shape.tiles, num_ctas, shape.warps, shape.steps, shape.rows, *_STEP)
    whole = parts.transpose(2, 0, 5, 3, 1, 4, 6, 8, 7, 9).reshape(num_ctas, shape.blocks * shape.rows, shape.num_columns)
    return whole[:, : shape.cta_rows].reshape(-1, shape.num_columns)[:num_rows, :num_columns]
