"""What delta.cu and rule.cu are compiled for, and the parameters of their launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.cuda.delta_shape import DeltaShape
from kog_dist.workers.prefill.base.delta_blocks import BLOCK
from kog_dist.workers.prefill.delta.plain import LEAST_LOG, UNIT_EPS
from kog_dist.workers.prefill.delta.state_layout import StateLayout

PREPARED_ROWS = 8  # that a warp of `prepare` takes one after the other
WARP_COLUMNS = 16  # columns of a value head's state that a warp of `advance_states` has
_MOST_WARPS = 4  # of a thread block of `advance_states`: they share what they multiply with
_PADDING = 8  # values behind each row in shared memory, so that neighbouring rows begin in other banks
DELTA_PREFILL_PARAMS = Struct(
    "DeltaPrefillParams",
    "Parameters of one launch; passed by value. Pointers are device addresses; a kernel reads those that it needs.",
    (
        Field("place_ptr", "u64", "int32: start of the chunk"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("overflow_ptr", "u64", "int32: set to 1 when a value is not finite"),
        Field("cache_number_ptr", "u64", "int32: which of the monokernel's sequences"),
        Field("states_ptr", "u64", "float32: the monokernel's states, one sequence behind the other"),
        Field("made_ptr", "u64", "float32: what the chunk makes of the states of a sequence"),
        Field("projected_ptr", "u64", "float32 (size, lanes * rows): the nets' input; outputs stand in the place of values"),
        Field("taps_ptr", "u64", "float32 (lanes, channels, conv_width)"),
        Field("factors_ptr", "u64", "float32 (lanes, 2 * heads): logarithms of rates, what is added to decays"),
        Field("norm_ptr", "u64", "float32 (value_dim)"),
        Field("query_ptr", "u64", "binary16 (blocks * BLOCK, lanes * key heads, key_dim)"),
        Field("key_ptr", "u64", "like query"),
        Field("value_ptr", "u64", "binary16 (blocks * BLOCK, lanes * heads, value_dim)"),
        Field(
            "logs_ptr",
            "u64",
            "float32 (lanes * heads, blocks * BLOCK): of decays; behind `solve_blocks` sums over each block",
        ),
        Field("beta_ptr", "u64", "float32 (lanes * heads, blocks * BLOCK)"),
        Field("solved_ptr", "u64", "binary16 (2, lanes * heads, blocks, BLOCK, BLOCK)"),
        Field("seen_ptr", "u64", "like solved"),
        Field("mixed_ptr", "u64", "binary16 (size, lanes, heads * value_dim)"),
        Field("size", "u32", "rows of the chunk"),
        Field("net", "u32", "which of all delta nets it is"),
    ),
)


def num_warps(shape: DeltaShape) -> int:
    """Of a thread block of `advance_states`."""
    groups = shape.net.value_dim // WARP_COLUMNS
    return max(count for count in (1, 2, _MOST_WARPS) if groups % count == 0)


def solve_shared_bytes(shape: DeltaShape) -> int:
    """Shared memory of a thread block of `solve_blocks`: keys, queries, the system; logarithms and betas."""
    return 2 * 2 * BLOCK * (shape.net.key_dim + _PADDING) + 4 * BLOCK * (BLOCK + 4) + 2 * 4 * BLOCK


def advance_shared_bytes(shape: DeltaShape) -> int:
    """The same of `advance_states`: two stages of keys, queries, both sums of two values, values, logarithms and betas."""
    halves = 2 * (shape.net.key_dim + _PADDING) + 4 * (BLOCK + _PADDING) + num_warps(shape) * WARP_COLUMNS + _PADDING
    return 2 * (2 * BLOCK * halves + 2 * 4 * BLOCK)


def delta_header(shape: DeltaShape, norm_eps: float) -> str:
    """`delta_shape.cuh` and `rule_shape.cuh`."""
    net = shape.net
    numbers = {
        "kLanes": shape.num_lanes, "kHeads": shape.heads, "kKeyHeads": shape.key_heads, "kKeyDim": net.key_dim,
        "kValueDim": net.value_dim, "kConvWidth": net.conv_width, "kRows": shape.matrix_rows, "kTerms": shape.terms,
        "kSlices": shape.slices,
        "kItemValues": shape.item_values, "kItemChannels": shape.item_channels, "kBlock": BLOCK, "kPadding": _PADDING,
        "kPreparedRows": PREPARED_ROWS, "kRuleWarps": num_warps(shape),
    }  # fmt: skip
    floats = {"kQueryScale": net.key_dim**-0.5, "kUnitEps": UNIT_EPS, "kLeastLog": LEAST_LOG, "kNormEps": norm_eps}
    lines = [device_header("kog_dist.workers.prefill.delta.delta_abi", (DELTA_PREFILL_PARAMS,)), "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    lines += [f"constexpr unsigned long long kSequenceValues = {StateLayout(shape).num_values}ull;"]
    return "\n".join([*lines, "}  // namespace kog", ""])
