"""What prefill.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

import math

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.shared_abi import MAX_THREADS, UNIT, cache_lines, threads_for

HELD_LANES = 8  # most lanes of a row whose values a thread of `residual` asks for at once
APPEND_ROWS = 4  # that a thread block of `append` takes at a time
# Rows at the end of a chunk of 1,024 and more among which `residual` looks for padding, to leave it out; more than `chunks` pads.
MOST_PADDING = 256
PREFILL_PARAMS = Struct(
    "PrefillParams",
    "Parameters of one launch; passed by value. Pointers are device addresses; a kernel reads those that it needs.",
    (
        Field("prompt_ptr", "u64", "uint32 (max_context + largest chunk)"),
        Field("place_ptr", "u64", "int32: start of the chunk; 0, end of its keys"),
        Field("next_start_ptr", "u64", "int32: where the next chunk begins"),
        Field("overflow_ptr", "u64", "int32: set to 1 when a value is not finite"),
        Field("embedding_ptr", "u64", "16-bit (vocab, hidden), of the weights' type"),
        Field("rope_ptr", "u64", "float32 (max_context, head_dim / 2, 2): cosine, sine"),
        Field("stream_ptr", "u64", "binary16 (lanes, size, hidden), or (1, size, hidden) for all lanes"),
        Field("unscale_ptr", "u64", "float32 (lanes or 1, hidden): factors of the streams read; 0 = none"),
        Field("scale_ptr", "u64", "float32 (lanes or 1, hidden): factors of the streams written; 0 = none"),
        Field("inverse_rms_ptr", "u64", "float32 (lanes, size)"),
        Field("qkv_ptr", "u64", "float32 (lanes, size, rows)"),
        Field("query_ptr", "u64", "binary16 (size, lanes * heads, head_dim)"),
        Field("keys_ptr", "u64", "binary16 (layers, positions, lanes * KV heads, head_dim), all positions or of one layer"),
        Field("values_ptr", "u64", "like keys"),
        Field("gate_up_ptr", "u64", "binary16 (lanes, size, 2 * ffn)"),
        Field("activation_ptr", "u64", "binary16 (lanes, size, ffn)"),
        Field("partial_ptr", "u64", "binary16 (lanes, size, hidden)"),
        Field("past_ptr", "u64", "like partial, of an earlier layer"),
        Field("total_ptr", "u64", "float32 (size, hidden)"),
        Field("own_sum_ptr", "u64", "float32 (size, hidden); 0 = not wanted"),
        Field("cache_ptr", "u64", "the monokernel's KV caches"),
        Field("cache_number_ptr", "u64", "int32: which of them"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("last_place_ptr", "u64", "like place, of that token; so are the next five"),
        Field("last_stream_ptr", "u64", "binary16 (lanes, 2, hidden)"),
        Field("last_inverse_rms_ptr", "u64", "float32 (lanes)"),
        Field("last_query_ptr", "u64", "binary16 (lanes * heads, head_dim)"),
        Field("last_partial_ptr", "u64", "float32 (lanes, 2, hidden): where `partial` goes; 0 = not wanted"),
        Field("last_past_ptr", "u64", "the same for `past`"),
        Field("last_streams_ptr", "u64", "float32 (lanes, hidden): the token's streams behind the last layer"),
        Field("size", "u32", "rows of the chunk"),
        Field("is_shared", "u32", "1: the streams read are one for all lanes"),
        Field("num_written", "u32", "streams to be written: all lanes, or one for all of them"),
        Field("first", "u32", "first position to copy; of append: of the groups of four values of a row"),
        Field("last", "u32", "one past the last of them"),
    ),
)


def prefill_header(layout: CacheLayout, *, num_positions: int, weight_dtype: str, kv_dtype: str) -> str:
    """`prefill_shape.cuh`. `num_positions`: rows of the plain keys and values of one layer."""
    spec = layout.spec
    numbers = {
        "kLanes": layout.num_lanes, "kHidden": spec.hidden_size, "kHeads": spec.lane_heads, "kKvHeads": spec.lane_kv_heads,
        "kScales": 1 if spec.shared_norm_scale else layout.num_lanes,
        "kHeadDim": spec.head_dim, "kFfn": spec.lane_ffn, "kLayers": spec.num_layers, "kMaxContext": spec.max_context,
        "kPositions": num_positions, "kUnit": UNIT, "kMaxThreads": MAX_THREADS, "kAppendRows": APPEND_ROWS,
        "kHeldLanes": HELD_LANES, "kMostPadding": MOST_PADDING,
        "kRowThreads": threads_for(spec.hidden_size // UNIT),
    }  # fmt: skip
    floats = {"kNormEps": spec.norm_eps, "kLocalScale": math.sqrt(spec.num_lanes)}
    lines = [device_header("kog_dist.workers.prefill.lanes.prefill_abi", (PREFILL_PARAMS,)), "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    return "\n".join([*lines, *cache_lines(layout, weight_dtype, kv_dtype), "}  // namespace kog", ""])
