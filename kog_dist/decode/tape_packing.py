"""The physical form of weight tapes: how a matrix becomes the stream that each thread block of the monokernel reads.

A product y = W x is cut by rows over the thread blocks, and within one by columns over its matrix warps. The tape of a thread
block holds, for each block of rows (at most 32: a finaliser warp has a thread for each), tiles in the order of use; a tile holds,
for each warp, a few steps of 32 columns, each step row by row: [block][tile][warp][step][row][32]. Of each eight neighbouring
columns the tape holds 0 1 4 5 2 3 6 7: the order of the registers that one thread gives to the matrix unit. Rows and columns that
do not divide are filled with zeros.

The tapes of all thread blocks are one array, [product][tile][thread block]: what they read at about the same time lies together.

The functions take numpy or cupy arrays of any 16-bit type and return the same kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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

    @property
    def cta_rows(self) -> int:
        """Rows that a thread block owns, padding included."""
        return self.rows * self.blocks

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
        return self.per * self.warps * STEP_COLUMNS

    @property
    def num_values(self) -> int:
        """Weights on the tape of one thread block."""
        return self.cta_rows * self.num_columns

    @property
    def tile_values(self) -> int:
        """Weights in one tile of one thread block."""
        return self.rows * self.steps * self.warps * STEP_COLUMNS


def op_shape(cta_rows: int, num_columns: int, multiple: int, *, warps: int, tile_rows: int, most_blocks: float) -> OpShape:
    """Shape for at least `cta_rows` rows of `num_columns` values; the rows of a block are a multiple of `multiple`.

    `tile_rows`: most rows of a block, and of rows times steps of a tile with several steps. Of the numbers of blocks that are
    needed, and up to `most_blocks` times as many, the first with the fewest rows.
    """
    fewest = -(-cta_rows // tile_rows)
    blocks = min(
        range(fewest, int(fewest * most_blocks) + 1), key=lambda blocks: blocks * _block_rows(cta_rows, blocks, multiple)
    )
    rows = _block_rows(cta_rows, blocks, multiple)
    per = -(-num_columns // (warps * STEP_COLUMNS))
    groups = -(-rows // 8)
    steps = max(s for s in range(1, per + 1) if per % s == 0 and (s == 1 or (s * rows <= tile_rows and s * groups <= MAX_PIECES)))
    return OpShape(rows, blocks, per, steps, warps)


def _block_rows(cta_rows: int, blocks: int, multiple: int) -> int:
    return -(-cta_rows // (blocks * multiple)) * multiple


def owned_rows(num_rows: int, num_ctas: int, multiple: int) -> int:
    """Rows of each thread block, a multiple of `multiple`; the last ones may own fewer, or none."""
    return -(-num_rows // (num_ctas * multiple)) * multiple


def interleave(gate: AnyArray, up: AnyArray) -> AnyArray:
    """Rows of gate and up (F, K) in turn (2F, K), so that the two rows of an FFN column have one owner."""
    both = np.stack([gate, up], axis=1)
    return both.reshape(-1, gate.shape[1])


def tiles_on_tape(tape: AnyArray, position: int, shape: OpShape, num_ctas: int) -> AnyArray:
    """View (num_tiles, num_ctas, tile_values) of a product on the tapes (values,) of all thread blocks.

    `position`: values of one thread block's tape that come before it.
    """
    first, size = position * num_ctas, shape.num_values * num_ctas
    return tape[first : first + size].reshape(shape.num_tiles, num_ctas, shape.tile_values)


def pack(matrix: AnyArray, shape: OpShape, num_ctas: int) -> AnyArray:
    """The tiles (num_tiles, num_ctas, tile_values) of a matrix (rows, K), 16 bit. Raises ValueError if it is too large."""
    rows, columns = matrix.shape
    if rows > num_ctas * shape.cta_rows or columns > shape.num_columns:
        raise ValueError(
            f"a matrix of {rows} x {columns} does not fit {num_ctas} thread blocks of {shape.cta_rows} rows and "
            f"{shape.num_columns} columns"
        )
    padded = np.zeros_like(matrix, shape=(num_ctas * shape.cta_rows, shape.num_columns))
    padded[:rows, :columns] = matrix
    parts = padded.reshape(num_ctas, shape.blocks, shape.rows, shape.warps, shape.tiles, shape.steps, *_STEP)
    # block, tile, thread block, warp, step, row, column (4)
    return parts.transpose(1, 4, 0, 3, 5, 2, 6, 8, 7, 9).reshape(shape.num_tiles, num_ctas, shape.tile_values)


def unpack(tiles: AnyArray, shape: OpShape, num_rows: int, num_columns: int) -> AnyArray:
    """The inverse of `pack`: the matrix (num_rows, num_columns), without its padding."""
    num_ctas = tiles.shape[1]
    parts = tiles.reshape(shape.blocks, shape.tiles, num_ctas, shape.warps, shape.steps, shape.rows, *_STEP)
    whole = parts.transpose(2, 0, 5, 3, 1, 4, 6, 8, 7, 9).reshape(num_ctas * shape.cta_rows, shape.num_columns)
    return whole[:num_rows, :num_columns]
