"""What tape_product.cuh is compiled for: tiles, and where matrices lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.coding import Coding
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape
from kog_dist.records import dataclass
from kog_dist.workers.cuda.code_names import CODES, SCALES
from kog_dist.workers.prefill.base.arrays import Array, address
from kog_dist.workers.prefill.base.hopper_abi import SHARED_BYTES, product

_GROUP_THREADS, _GROUP_LINES = 128, 64  # a group of warps, and the rows of a matrix that it multiplies
PAIR = 2  # thread blocks that share their rows
PANEL = 64  # columns that stand together in shared memory
_ALIGNMENT, _BARRIER_BYTES = 1024, 128
_OTHER_BYTES = 1088 + _ALIGNMENT + _BARRIER_BYTES  # of shared memory: static memory and what the system takes, too
_MOST_STAGES = 6
_WEIGHT_SCALES = {"E4M3": 2.0**8, "E2M1": 1.0, "INT4": 2.0**4}  # scales of some 1e-4 become normal numbers of binary16
MakeMap = Callable[[int, Sequence[int], Sequence[int], Sequence[int]], NDArray[np.uint64]]


@dataclass(frozen=True)
class TapeTile:
    """A size of tiles: up to so many rows, and `lines` rows of a matrix.

    `stage_bytes`: of shared memory for the part of both that is multiplied at a time, `stage_columns` of each row. `ctas`: thread
    blocks that share a multiprocessor. `least`: those that are multiplied are a multiple of it.
    `is_ahead`: operands are expanded beside the group's own products. `groups`: of warps, that multiply.
    """

    rows: int
    stage_bytes: int
    stage_columns: int
    ctas: int
    least: int
    is_ahead: bool = True
    groups: int = 2

    @property
    def lines(self) -> int:
        """Rows of a matrix."""
        return _GROUP_LINES * self.groups

    @property
    def num_threads(self) -> int:
        """Of a thread block; those of one more group copy."""
        return _GROUP_THREADS * (self.groups + 1)

    @property
    def stages(self) -> int:
        """In shared memory at once."""
        return min((SHARED_BYTES // self.ctas - _OTHER_BYTES) // self.stage_bytes, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return _ALIGNMENT + self.stages * self.stage_bytes + _BARRIER_BYTES

    def rows_map(self, x: Array, make_map: MakeMap) -> NDArray[np.uint64]:
        """Of what is multiplied, (lanes, rows, columns), in the boxes that a thread block copies. `make_map`: as `tensor_map`."""
        lanes, size, columns = x.shape
        row_bytes, lane_bytes = x.strides[1], x.strides[0] if lanes > 1 else size * x.strides[1]
        strides = (row_bytes, lane_bytes, lanes * lane_bytes)
        return make_map(address(x), (columns, size, lanes, 1), strides, (PANEL, self.least // PAIR, 1, 1))

    def header(self) -> list[str]:
        """Lines: the struct `Tile` with its number of rows."""
        numbers = {
            "kRows": self.rows,
            "kStages": self.stages,
            "kStageBytes": self.stage_bytes,
            "kStage": self.stage_columns,
            "kCtas": self.ctas,
            "kLeast": self.least,
            "kIsAhead": int(self.is_ahead),
            "kLines": self.lines,
            "kThreads": _GROUP_THREADS * self.groups,
        }
        return [struct(f"Tile{self.rows}", numbers)]


def part_bytes(coding: Coding | None, rows: int) -> int:
    """Of a step of a block of rows."""
    return 2 * rows * STEP_COLUMNS if coding is None else coding.part_bytes(rows)


def stage_bytes(coding: Coding | None, rows: int, columns: int, ops: Iterable[OpShape], groups: int = 2) -> int:
    """Of a stage of a tile of `rows` rows, for `groups` groups of warps and matrices of all these shapes (tape_product.cuh)."""
    lines = _GROUP_LINES * groups
    row_bytes, bits = (coding.row_bytes, coding.bits) if coding else (2 * STEP_COLUMNS, 16)
    others = max(blocks_of_tile(op.rows, lines) * (part_bytes(coding, op.rows) - op.rows * row_bytes) for op in ops)
    return -(-(2 * rows * columns + lines * columns * bits // 8 + others) // 1024) * 1024


def blocks_of_tile(rows: int, lines: int) -> int:
    """Blocks of so many rows that a tile has some of, at most (`TileLines` in tape_product.cuh)."""
    return (lines + 2 * rows - 1 - (rows & -rows)) // rows


def pairs_across(op: OpShape, num_rows: int, tile: TapeTile) -> int:
    """Pairs of tiles that so many rows of a matrix take."""
    all_lines = -(-num_rows // op.cta_rows) * op.blocks * op.rows
    return -(-all_lines // (PAIR * tile.lines))


def weight_constants(coding: Coding | None, weight_dtype: str) -> tuple[dict[str, int], dict[str, bool], dict[str, float]]:
    """Of a header: numbers, flags and fractions that operands.cuh and weights.cuh read."""
    numbers = {
        "kRowBytes": coding.row_bytes if coding else 2 * STEP_COLUMNS,
        "kScales": coding.scales if coding else 1,
        "kScaleBytes": coding.scale_bytes if coding else 0,
        "kZeroBytes": coding.zero_bytes if coding else 0,
    }
    flags = {"kIsCoded": coding is not None, "kIsHalf": weight_dtype == "float16"}
    return numbers, flags, {"kWeightScale": _WEIGHT_SCALES[coding.number] if coding and coding.scales else 1.0}


def constant_lines(numbers: dict[str, int], flags: dict[str, bool], floats: dict[str, float]) -> list[str]:
    """Of a header."""
    return [
        *(f"constexpr u32 {name} = {value};" for name, value in numbers.items()),
        *(f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()),
        *(f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()),
    ]


def code_lines(coding: Coding | None) -> list[str]:
    """Of a header, outside of the namespace: which of weights.cuh's codes and scales these are."""
    code, scale = (CODES[coding.number], SCALES[coding.scale]) if coding else ("Plain", "Float32Scale")
    return [f"#define KOG_CODE {code}", f"#define KOG_SCALE {scale}"]


def product_lines(tiles: Iterable[TapeTile]) -> list[str]:
    """Of a header: the products of all widths."""
    widths = sorted({width for tile in tiles for width in range(tile.least, tile.rows + 1, tile.least)})
    return [product("multiply_rows", width, of_rows=True, in_registers=True) for width in widths]


def form(name: str, op: OpShape, num_ctas: int, num_rows: int) -> str:
    """Where the rows of a matrix lie (weights.cuh); a step has what `OpShape.step_columns` says."""
    numbers = {
        "kCtas": num_ctas, "kCtaRows": op.cta_rows, "kRows": op.rows, "kLastRows": op.rows_of(op.blocks - 1),
        "kBlocks": op.blocks, "kPer": op.per, "kSteps": op.steps, "kTiles": op.tiles, "kWarps": op.warps_of(0),
        "kLongTiles": op.num_long_tiles, "kMatrixRows": num_rows,
    }  # fmt: skip
    return struct(name, numbers)


def struct(name: str, numbers: dict[str, int]) -> str:
    """Of constants."""
    return f"struct {name} {{ static constexpr u32 {', '.join(f'{key} = {value}' for key, value in numbers.items())}; }};"
