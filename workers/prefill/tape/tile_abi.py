"""What tape_product.cuh and expert_product.cuh are compiled for: tiles, and where matrices lie."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kog_dist.decode.coding import CODED_COLUMNS, Coding
from kog_dist.decode.tape_packing import STEP_COLUMNS, OpShape
from kog_dist.workers.cuda.code_names import CODES, SCALES
from kog_dist.workers.prefill.hopper_abi import SHARED_BYTES, product

TILE_THREADS = 256  # that multiply
LEAST_WIDTH = 32  # of what is multiplied of a tile of experts: rows, of which it may have fewer than it has room for
STAGE_COLUMNS = 64  # of 16 bit that are multiplied at a time
COLUMNS = 128  # of a tile: rows of a matrix, at most
_ALIGNMENT, _BARRIER_BYTES = 1024, 128
_OTHER_BYTES = 1088 + _ALIGNMENT + _BARRIER_BYTES  # of shared memory: static memory and what the system takes, too
_MOST_STAGES = 6
_WEIGHT_SCALES = {"E4M3": 2.0**8, "E2M1": 1.0, "INT4": 2.0**4}  # scales of some 1e-4 become normal numbers of binary16


@dataclass(frozen=True)
class TapeTile:
    """A size of tiles: up to so many rows, and COLUMNS rows of a matrix.

    `stage_bytes`: of shared memory for the part of both that is multiplied at a time, `stage_columns` of each row. `ctas`: thread
    blocks that share a multiprocessor. `least`: rows that are multiplied in any case; above, multiples of it.
    """

    rows: int
    stage_bytes: int
    stage_columns: int
    ctas: int
    least: int = LEAST_WIDTH

    @property
    def stages(self) -> int:
        """In shared memory at once."""
        return min((SHARED_BYTES // self.ctas - _OTHER_BYTES) // self.stage_bytes, _MOST_STAGES)

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return _ALIGNMENT + self.stages * self.stage_bytes + _BARRIER_BYTES

    def lines(self) -> list[str]:
        """Of a header: the struct `Tile` with its number of rows."""
        numbers = {
            "kRows": self.rows, "kStages": self.stages, "kStageBytes": self.stage_bytes,
            "kStage": self.stage_columns, "kCtas": self.ctas, "kLeast": self.least,
        }  # fmt: skip
        return [struct(f"Tile{self.rows}", numbers)]


def stage_columns(coding: Coding | None) -> int:
    """Columns that are multiplied at a time: whole steps."""
    return STAGE_COLUMNS if coding is None else CODED_COLUMNS


def part_bytes(coding: Coding | None, rows: int) -> int:
    """Of a step of a block of rows."""
    return 2 * rows * STEP_COLUMNS if coding is None else coding.part_bytes(rows)


def stage_bytes(coding: Coding | None, rows: int, columns: int, ops: Iterable[OpShape]) -> int:
    """Of a stage of a tile of `rows` rows and whole blocks (expert_product.cuh), for matrices of all these shapes."""
    steps = columns // (STEP_COLUMNS if coding is None else CODED_COLUMNS)
    of_weights = max(COLUMNS // op.rows * part_bytes(coding, op.rows) for op in ops)
    return -(-(2 * rows * columns + steps * of_weights) // 1024) * 1024


def num_across(op: OpShape, num_rows: int) -> int:
    """Tiles that the rows of a matrix take (`WholeBlocks` in expert_product.cuh)."""
    return -(-(-(-num_rows // op.cta_rows) * op.blocks) // (COLUMNS // op.rows))


def weight_constants(coding: Coding | None, weight_dtype: str) -> tuple[dict[str, int], dict[str, bool], dict[str, float]]:
    """Of a header: numbers, flags and fractions that operands.cuh and weights.cuh read."""
    numbers = {
        "kTileThreads": TILE_THREADS, "kColumns": COLUMNS, "kLeastWidth": LEAST_WIDTH, "kFirstWideTile": 96,
        "kRowBytes": coding.row_bytes if coding else 2 * STEP_COLUMNS,
        "kScales": coding.scales if coding else 1, "kScaleBytes": coding.scale_bytes if coding else 0,
        "kZeroBytes": coding.zero_bytes if coding else 0,
    }  # fmt: skip
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
