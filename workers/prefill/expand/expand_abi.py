"""What expand.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.decode.coding import Coding
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.code_names import CODES, SCALES
from kog_dist.workers.prefill.base.shared_abi import UNIT

EXPAND_PARAMS = Struct(
    "ExpandParams",
    "Parameters of one launch; passed by value. A matrix has one product for each lane, or for a few neighbouring ones.",
    (
        Field("tape_ptr", "u64", "the monokernel's weights"),
        Field("scales_ptr", "u64", "float32 (products, num_ctas, kScaleRows): of rows, where each has one"),
        Field("places_ptr", "u64", "uint64 (products of the matrix, 2): first byte on the tape, number among all products"),
        Field("factor_ptr", "u64", "float32 (lanes or 1, columns): columns are multiplied by it; 0 = they are not"),
        Field("out_ptr", "u64", "binary16 (lanes, lane_rows, columns)"),
        Field("num_ctas", "u32", "thread blocks of the monokernel that own rows"),
        Field("rows", "u32", "of a block"),
        Field("last_rows", "u32", "of the last block"),
        Field("blocks", "u32", "of rows in a thread block"),
        Field("tiles", "u32", "of a block: a step of 128 columns of each warp"),
        Field("warps", "u32", "that have a part of the first tile"),
        Field("long_tiles", "u32", "tiles with a part of all these; the others have one less"),
        Field("columns", "u32", "of the matrix"),
        Field("product_rows", "u32", "rows of a product"),
        Field("lane_rows", "u32", "rows of a lane"),
        Field("factor_stride", "u32", "columns, where each lane has its own factors; else 0"),
        Field("is_interleaved", "u32", "1: on the tape rows of the lane's upper and lower half come in turn"),
    ),
)


def expand_header(coding: Coding, scale_rows: int) -> str:
    """`expand_shape.cuh`. `scale_rows`: see `KernelShape.scale_rows`."""
    numbers = {
        "kUnit": UNIT,
        "kRowBytes": coding.row_bytes,
        "kScales": coding.scales,
        "kScaleBytes": coding.scale_bytes,
        "kZeroBytes": coding.zero_bytes,
        "kScaleRows": scale_rows,
    }
    lines = [
        device_header("kog_dist.workers.prefill.expand.expand_abi", (EXPAND_PARAMS,)),
        "namespace kog {",
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        "}  // namespace kog",
        f"#define KOG_CODE {CODES[coding.number]}",
        f"#define KOG_SCALE {SCALES[coding.scale]}",
        "",
    ]
    return "\n".join(lines)
