"""What gates.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.delta_shape import DeltaShape

GATES_PARAMS = Struct(
    "GatesParams",
    "Parameters of one launch; passed by value. Pointers are device addresses; a kernel reads those that it needs.",
    (
        Field("place_ptr", "u64", "int32: start of the chunk"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("qkv_ptr", "u64", "float32 (size, lanes * rows): of each lane queries, keys, values, gates"),
        Field("attended_ptr", "u64", "binary16 (lanes, size, heads * head_dim)"),
        Field("mixed_ptr", "u64", "binary16 (size, lanes, heads * value_dim), of delta nets"),
        Field("last_qkv_ptr", "u64", "like qkv, of the prompt's last token; so is the next one"),
        Field("last_mixed_ptr", "u64", "like mixed"),
        Field("x_ptr", "u64", "binary16 (size, hidden)"),
        Field("shared_gate_ptr", "u64", "float32 (hidden)"),
        Field("shared_ptr", "u64", "binary16 (lanes, size, hidden): what the shared expert gives"),
        Field("partial_ptr", "u64", "like shared: what all experts give"),
        Field("size", "u32", "rows of the chunk"),
    ),
)


def gates_header(spec: ModelSpec, num_lanes: int, delta: DeltaShape | None) -> str:
    """`gates_shape.cuh`."""
    numbers = {
        "kLanes": num_lanes, "kQkvRows": spec.lane_qkv_rows, "kGates": spec.lane_heads * spec.head_dim,
        "kHidden": spec.hidden_size, "kMixed": 0 if delta is None else num_lanes * delta.heads * delta.net.value_dim,
    }  # fmt: skip
    lines = [device_header("kog_dist.workers.prefill.dense.gates_abi", (GATES_PARAMS,)), '#include "ptx.cuh"', "namespace kog {"]
    lines += [f"constexpr unsigned {name} = {value};" for name, value in numbers.items()]
    return "\n".join([*lines, "}  // namespace kog", ""])
