"""What wide_attention.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

import math

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape

WIDE_HEAD_DIM = 256  # at most: values of a head whose sums a thread has registers for
WIDE_ROWS, WIDE_THREADS = 64, 128  # of an item: a warp has 16 rows
WIDE_KEYS = 64  # in a tile; decides about bits
_PADDING = 8  # values behind each row in shared memory, so that neighbouring rows begin in other banks
WIDE_PARAMS = Struct(
    "WideAttentionParams",
    "Parameters of one launch of wide_attention.cu; passed by value. Pointers are device addresses.",
    (
        Field("place_ptr", "u64", "int32: position of the first row"),
        Field("query_ptr", "u64", "binary16 (size, heads, head_dim)"),
        Field("keys_ptr", "u64", "binary16 (positions, KV heads, head_dim)"),
        Field("values_ptr", "u64", "like keys"),
        Field("out_ptr", "u64", "binary16 (lanes, size, heads of a lane, head_dim)"),
        Field("size", "u32", "rows of the chunk"),
        Field("num_tiles", "u32", "of rows: items of a head"),
    ),
)


def wide_shared_bytes(shape: AttentionShape) -> int:
    """Shared memory of a thread block: queries, a tile of keys and one of values."""
    return 2 * (WIDE_ROWS + 2 * WIDE_KEYS) * (shape.head_dim + _PADDING)


def wide_header(shape: AttentionShape) -> str:
    """`wide_attention_shape.cuh`."""
    numbers = {
        "kHeadDim": shape.head_dim, "kShare": shape.share, "kLaneHeads": shape.lane_heads, "kHeads": shape.num_heads,
        "kKvHeads": shape.num_kv_heads, "kRows": WIDE_ROWS, "kKeys": WIDE_KEYS, "kPadding": _PADDING,
    }  # fmt: skip
    lines = [device_header("kog_dist.workers.prefill.attention.wide_abi", (WIDE_PARAMS,)), "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    scale = shape.head_dim**-0.5 * math.log2(math.e)  # exponents of 2
    return "\n".join([*lines, f"constexpr float kScale = static_cast<float>({scale!r});", "}  // namespace kog", ""])
