"""What gate_up.cu, qkv.cu and partial.cu are compiled for, and the parameters of their launches (gemm.cuh)."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.records import dataclass
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.kv_format import FORMATS
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.hopper_abi import GROUP_ROWS, GROUPS, product

DEPTH, SLOTS = 64, 4  # values of a row that are copied together; such parts of a tile in shared memory at once
CLUSTER = 2  # thread blocks that share what they read of the matrix
COLUMNS = 256  # of a tile: rows of the matrix
TILE_ROWS = GROUPS * GROUP_ROWS
CLUSTER_ROWS = CLUSTER * TILE_ROWS
_LEAST_STEPS = 4  # of a tile: beside them, what is left of the one before it is done
_HEAD_DIMS = (32, 64, 96, 128)  # of qkv.cu
TILE_PARAMS = Struct(
    "TileParams",
    "Parameters of one launch; passed by value. Pointers are device addresses; a kernel reads those that it needs.",
    (
        Field("x_map", "u64", "CUtensorMap of what is multiplied: values of a row, rows, lanes", count=16),
        Field("matrix_map", "u64", "CUtensorMap of the matrix: values of a row, and four dimensions that order rows", count=16),
        Field("inverse_rms_ptr", "u64", "float32 (lanes, rows)"),
        Field("out_ptr", "u64", "binary16 (lanes, rows, results)"),
        Field("rope_ptr", "u64", "float32 (max_context, head_dim / 2, 2): cosine, sine"),
        Field("place_ptr", "u64", "int32: start of the chunk"),
        Field("query_ptr", "u64", "binary16 (rows, lanes * heads, head_dim)"),
        Field("keys_ptr", "u64", "binary16 (positions, lanes * KV heads, head_dim)"),
        Field("values_ptr", "u64", "like keys"),
        Field("overflow_ptr", "u64", "int32: set to 1 when a value is not finite"),
        Field("rows", "u32", "of a lane; a multiple of those of a cluster"),
        Field("num_tiles", "u32", "of clusters"),
        Field("band", "u32", "clusters of rows that are taken together; divides those of a lane"),
        Field("is_shared", "u32", "1: what is multiplied is the same for all lanes"),
    ),
    size_multiple=64,
)


@dataclass(frozen=True)
class TileShape:
    """One kernel of a model: `kernel` is the stem of its file. Raises nothing: see `misfit`."""

    kernel: str
    inner: int  # values of a row of the matrix
    width: int  # rows of the matrix of a lane
    lines: tuple[str, ...] = ()  # of its header

    @property
    def interleaves(self) -> bool:
        """Whether the matrix has two halves, whose rows belong together."""
        return self.kernel == "gate_up"

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return 1024 + SLOTS * ((TILE_ROWS + COLUMNS) * DEPTH * 2 + 16)

    @property
    def misfit(self) -> str:
        """What the kernel cannot take; empty if there is nothing."""
        findings = []
        if self.inner % DEPTH or self.inner < _LEAST_STEPS * DEPTH:
            findings.append(f"{self.inner} values in a row (a multiple of {DEPTH}, at least {_LEAST_STEPS * DEPTH})")
        if self.width % COLUMNS:
            findings.append(f"{self.width} rows of a lane's matrix (a multiple of {COLUMNS})")
        return "; ".join(findings)

    def header(self) -> str:
        """The kernel's `..._shape.cuh`."""
        products = product("multiply_rows", COLUMNS, of_rows=True)
        return "\n".join([self.constants(), "namespace kog {", products, "}  // namespace kog", ""])

    def constants(self) -> str:
        """The header without products."""
        numbers = {"kInner": self.inner, "kWidth": self.width, "kSlots": SLOTS, "kSharedBytes": self.shared_bytes}
        lines = [device_header("kog_dist.workers.prefill.gemm.gemm_abi", (TILE_PARAMS,)), '#include "ptx.cuh"', "namespace kog {"]
        lines += [f"constexpr unsigned {name} = {value};" for name, value in numbers.items()]
        return "\n".join([*lines, *self.lines, "}  // namespace kog", ""])


def tile_shapes(layout: CacheLayout, kv_dtype: str) -> dict[str, TileShape]:
    """By product, the kernels of a rank's lanes, as far as they fit."""
    spec = layout.spec
    numbers = {
        "kLanes": layout.num_lanes,
        "kHeads": spec.lane_heads,
        "kKvHeads": spec.lane_kv_heads,
        "kHeadDim": spec.head_dim,
        "kMaxContext": spec.max_context,
    }
    lines = [f"constexpr unsigned {name} = {value};" for name, value in numbers.items()]
    lines += [f"using KvFormat = {FORMATS[kv_dtype]};"]
    qkv = spec.lane_qkv_rows
    found = {
        "qkv": TileShape("qkv", spec.hidden_size, qkv, tuple(lines)),
        "gate_up": TileShape("gate_up", spec.hidden_size, 2 * spec.lane_ffn),
        "down": TileShape("partial", spec.lane_ffn, spec.hidden_size),
    }
    if spec.head_dim not in _HEAD_DIMS:
        del found["qkv"]
    return {product: shape for product, shape in found.items() if not shape.misfit}
