"""What attention.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

import math

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.records import dataclass
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.prefill.base.hopper_abi import GROUP_ROWS, GROUPS, SHARED_BYTES, product

# Keys that are attended to from nothing. These decide about bits, as `AttentionShape.keys` does: few rows behind some thousand
# keys need many partitions to keep the GPU busy, and what partitions give is merged, which takes time.
PARTITION_KEYS, SHORT_PARTITIONS, LONG_PARTITION_KEYS = 1024, 8, 4096  # the first ones, how many, and those behind them
MAX_HEAD_DIM = 128
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
        Field("sinks_ptr", "u64", "float32 (heads): one more logit of each, which no value is mixed for; 0: there are none"),
        Field("parts_ptr", "u64", "float32 (items, groups, head_dim / 8, threads, 4): sums of values, of units"),
        Field("part_sums_ptr", "u64", "float32 (items, groups, threads, 4): largest scores of two rows, sums of exponentials"),
        Field("size", "u32", "rows of the chunk"),
        Field("window", "u32", "positions that a token sees, itself among them; 0: all before it"),
        Field("is_partitioned", "u32", "1: keys are attended to in partitions"),
        Field("num_groups", "u32", "groups of an item: 1 or 2; 4 of a pair of thread blocks"),
        Field("num_tiles", "u32", "tiles of rows: what a head has items for"),
        Field("num_units", "u32", "units of partitions that are items of their own; 0: an item has all partitions of its rows"),
        Field("first_partitions", "u32", "partitions of the first unit; all others have one"),
        Field("num_items", "u32", "tiles times items' heads, times units if there are any"),
        Field("is_ordered", "u32", "1: outputs are in the order of products (tape/weights.cuh)"),
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
        """Tiles of keys or of values in shared memory at once, or queries of an item."""
        return min(_MAX_SLOTS, (SHARED_BYTES - 1024 - 256 - self._totals_bytes) // self._slot_bytes)

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return 1024 + self.slots * self._slot_bytes + self._totals_bytes + 16 * self.slots

    @property
    def _slot_bytes(self) -> int:
        return max(self.keys, GROUPS * GROUP_ROWS) * self.head_dim * 2

    @property
    def _totals_bytes(self) -> int:
        return GROUPS * GROUP_ROWS * self.head_dim * 4  # of partitions

    def header(self) -> str:
        """`attention_shape.cuh`."""
        scores, values = (
            product("multiply_rows", self.keys, of_rows=True, in_registers=True),
            product("multiply_columns", self.head_dim, of_rows=False),
        )
        return "\n".join([self.constants(), "namespace kog {", scores, values, "}  // namespace kog", ""])

    def constants(self) -> str:
        """The header without products."""
        numbers = {
            "kHeadDim": self.head_dim, "kPanel": self.panel, "kPack": self.pack, "kShare": self.share,
            "kLaneHeads": self.lane_heads, "kPackedHeads": self.num_heads // self.pack,
            "kGroups": GROUPS, "kKeys": self.keys, "kSlots": self.slots, "kSharedBytes": self.shared_bytes,
            "kPartitionTiles": PARTITION_KEYS // self.keys, "kShortPartitions": SHORT_PARTITIONS,
            "kLongPartitionTiles": LONG_PARTITION_KEYS // self.keys,
        }  # fmt: skip
        lines = [device_header("kog_dist.workers.prefill.attention.attention_abi", (ATTENTION_PARAMS,)), "namespace kog {"]
        lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
        floats = {"kLog2e": math.log2(math.e), "kScale": self.head_dim**-0.5 * math.log2(math.e)}  # exponents of 2
        lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
        return "\n".join([*lines, "}  // namespace kog", ""])


def num_partitions(num_keys: int) -> int:
    """Partitions of the first `num_keys` positions."""
    behind = num_keys - SHORT_PARTITIONS * PARTITION_KEYS
    return -(-num_keys // PARTITION_KEYS) if behind <= 0 else SHORT_PARTITIONS - (-behind // LONG_PARTITION_KEYS)


def misfit(head_dim: int) -> str:
    """What of a model attention.cu cannot take; empty if there is nothing."""
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"{head_dim} values in a head (a multiple of 16, at most {MAX_HEAD_DIM})"
    return ""
