"""What attention.cu is compiled for, the parameters of its launches, and the products that it is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kog_dist.abi import Field, Struct
from kog_dist.collectives.cuda_abi import device_header

HOPPER = (9, 0)  # compute capability of the GPUs that attention.cu runs on: sm_90a is no other's
GROUPS, GROUP_ROWS, GROUP_THREADS = 2, 64, 128  # at most in an item; a group are four warps, which multiply so many rows at once
NUM_THREADS = (GROUPS + 1) * GROUP_THREADS  # of a thread block: one more group queues copies
CHUNK_KEYS = 1024  # keys that are attended to from nothing; decides about bits, as `AttentionShape.keys` does
MAX_HEAD_DIM = 128
_SHARED_BYTES = 227 << 10  # all that a thread block can have
_MAX_SLOTS = 6
ATTENTION_PARAMS = Struct(
    "AttentionParams",
    "Parameters of one launch of attention.cu; passed by value. Pointers are device addresses.",
    (
        Field("query_map", "u64", "CUtensorMap of queries: panel, heads of an item, rows, panels, items' heads", count=16),
        Field("keys_map", "u64", "CUtensorMap of a layer's keys: panel, positions, panels, KV heads", count=16),
        Field("values_map", "u64", "like keys", count=16),
        Field("place_ptr", "u64", "int32: position of the first row"),
        Field("out_ptr", "u64", "binary16 (lanes, size, heads of a lane, head_dim)"),
        Field("parts_ptr", "u64", "float32 (items, groups, head_dim / 8, threads, 4): sums of values, of chunks"),
        Field("part_sums_ptr", "u64", "float32 (items, groups, threads, 4): largest scores of two rows, sums of exponentials"),
        Field("size", "u32", "rows of the block"),
        Field("window", "u32", "positions that a token sees, itself among them; 0: all before it"),
        Field("is_chunked", "u32", "1: keys are attended to in chunks"),
        Field("num_groups", "u32", "groups of an item: 1 or 2"),
        Field("num_tiles", "u32", "tiles of rows: what a head has items for"),
        Field("num_chunks", "u32", "chunks that are items of their own; 0: an item has all chunks of its rows"),
        Field("num_items", "u32", "tiles times items' heads, times chunks if there are any"),
    ),
    size_multiple=64,
)


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one rank, and how they are cut. Raises nothing: see `misfit`."""

    head_dim: int
    num_heads: int  # query heads of the rank
    num_kv_heads: int
    lane_heads: int  # query heads of a lane
    keys: int = 128  # in a tile; decides about bits

    @property
    def share(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def pack(self) -> int:
        """Query heads of one KV head whose rows are multiplied together."""
        return self.share if GROUP_ROWS % self.share == 0 else 1

    @property
    def panel(self) -> int:
        """Values of a row that stand together in shared memory."""
        return math.gcd(self.head_dim, 64)

    @property
    def slots(self) -> int:
        """Tiles of keys or of values in shared memory at once."""
        rest = _SHARED_BYTES - 1024 - 256 - GROUPS * GROUP_ROWS * self.head_dim * 6  # queries, sums of chunks
        return min(_MAX_SLOTS, rest // (self.keys * self.head_dim * 2))

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        used = self.slots * self.keys * self.head_dim * 2 + GROUPS * GROUP_ROWS * self.head_dim * 6
        return 1024 + used + 16 * (self.slots + GROUPS)

    def header(self) -> str:
        """`attention_shape.cuh`."""
        scores, values = (
            _product("multiply_rows", self.keys, of_rows=True),
            _product("multiply_columns", self.head_dim, of_rows=False),
        )
        return "\n".join([self.constants(), "namespace kog {", scores, values, "}  // namespace kog", ""])

    def constants(self) -> str:
        """The header without products."""
        numbers = {
            "kHeadDim": self.head_dim, "kPanel": self.panel, "kPack": self.pack, "kShare": self.share,
            "kLaneHeads": self.lane_heads, "kPackedHeads": self.num_heads // self.pack,
            "kGroups": GROUPS, "kKeys": self.keys, "kSlots": self.slots, "kChunkTiles": CHUNK_KEYS // self.keys,
            "kSharedBytes": self.shared_bytes,
        }  # fmt: skip
        lines = [device_header("kog_dist.workers.prefill.attention_abi", (ATTENTION_PARAMS,)), "namespace kog {"]
        lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        lines += [f"constexpr float kScale = static_cast<float>({self.head_dim**-0.5 * math.log2(math.e)!r});  // exponents of 2"]
        return "\n".join([*lines, "}  // namespace kog", ""])


def misfit(head_dim: int) -> str:
    """What of a model attention.cu cannot take; empty if there is nothing."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"{head_dim} values in a head (a multiple of 16, at most {MAX_HEAD_DIM})"
    return ""


def _product(name: str, columns: int, *, of_rows: bool) -> str:
    """A function that queues d (64 x `columns`) = or += a (64 x 16) times b.

    `of_rows`: a's and b's rows are in shared memory, and d has a column for each row of b. Else a is in registers, and b's 16
    rows are multiplied by it. A thread has, for every 8 columns, two neighbours of row laneid / 4 of its warp's 16 rows, and two
    of the row 8 below, from column 2 * (laneid % 4) on.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if of_rows:
        arguments, a, inputs = "u64 a, u64 b, bool adds", f"%{count}", '"l"(a), "l"(b), "r"(static_cast<u32>(adds))'
        b, adds, transposed = f"%{count + 1}", f"%{count + 2}", "0, 0"
    else:
        arguments, a = "u32 a0, u32 a1, u32 a2, u32 a3, u64 b", "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        b, adds, transposed, inputs = f"%{count + 4}", "1", "1", '"r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b)'
    return f"""__device__ __forceinline__ void {name}(float (&d)[{count}], {arguments}) {{
    asm volatile(
        "{{\\n .reg .pred adds;\\n setp.ne.b32 adds, {adds}, 0;\\n"
        " wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, {a}, {b}, adds, 1, 1, {transposed};\\n}}"
        : {bound}
        : {inputs});
}}"""
