"""What gate_up.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from dataclasses import dataclass

from kog_dist.abi import Field, Struct
from kog_dist.collectives.cuda_abi import device_header
from kog_dist.workers.prefill.hopper_abi import GROUP_ROWS, GROUPS, product

DEPTH, SLOTS = 64, 4  # values of a row that are copied together; such parts of a tile in shared memory at once
CLUSTER = 2  # thread blocks that share what they read of the matrix
COLUMNS = 256  # of a tile: gates and ups
ACTIVATIONS = COLUMNS // 2
TILE_ROWS = GROUPS * GROUP_ROWS
CLUSTER_ROWS = CLUSTER * TILE_ROWS
_LEAST_STEPS = 8  # of a tile: beside as many, what is left of the one before it is done
GATE_UP_PARAMS = Struct(
    "GateUpParams",
    "Parameters of one launch of gate_up.cu; passed by value. Pointers are device addresses.",
    (
        Field("x_map", "u64", "CUtensorMap of the streams: hidden, rows, lanes", count=16),
        Field("matrix_map", "u64", "CUtensorMap of gates and ups: hidden, and four dimensions that interleave them", count=16),
        Field("inverse_rms_ptr", "u64", "float32 (lanes, rows)"),
        Field("activation_ptr", "u64", "binary16 (lanes, rows, ffn)"),
        Field("rows", "u32", "of a lane; a multiple of those of a cluster"),
        Field("num_tiles", "u32", "of clusters"),
        Field("band", "u32", "clusters of rows that are taken together; divides those of a lane"),
        Field("is_shared", "u32", "1: the streams are one for all lanes"),
    ),
    size_multiple=64,
)


@dataclass(frozen=True)
class GateUpShape:
    """Gates and ups of one rank. Raises nothing: see `misfit`."""

    hidden_size: int
    ffn: int  # columns of a lane

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, what alignment takes included."""
        return 1024 + SLOTS * ((TILE_ROWS + COLUMNS) * DEPTH * 2 + 16)

    def header(self) -> str:
        """`gate_up_shape.cuh`."""
        products = product("multiply_rows", COLUMNS, of_rows=True)
        return "\n".join([self.constants(), "namespace kog {", products, "}  // namespace kog", ""])

    def constants(self) -> str:
        """The header without products."""
        numbers = {"kHidden": self.hidden_size, "kFfn": self.ffn, "kSlots": SLOTS, "kSharedBytes": self.shared_bytes}
        lines = [device_header("kog_dist.workers.prefill.gate_up_abi", (GATE_UP_PARAMS,)), "namespace kog {"]
        lines += [f"constexpr unsigned {name} = {value};" for name, value in numbers.items()]
        return "\n".join([*lines, "}  // namespace kog", ""])


def misfit(shape: GateUpShape) -> str:
    """What of a model gate_up.cu cannot take; empty if there is nothing."""
    findings = []
    if shape.hidden_size % DEPTH or shape.hidden_size < _LEAST_STEPS * DEPTH:
        findings.append(f"{shape.hidden_size} values in a stream (a multiple of {DEPTH}, at least {_LEAST_STEPS * DEPTH})")
    if shape.ffn % ACTIVATIONS:
        findings.append(f"{shape.ffn} FFN columns in a lane (a multiple of {ACTIVATIONS})")
    return "; ".join(findings)
