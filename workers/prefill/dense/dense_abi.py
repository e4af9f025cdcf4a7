"""What dense.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import device_header
from kog_dist.model.layers import AttentionMixer
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.abi import Field, Struct
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.base.shared_abi import UNIT, cache_lines, threads_for
from kog_dist.workers.prefill.buffers.dense import ffn_columns

MAX_THREADS = 256  # of a thread block, but for those that have a row of the stream
APPEND_ROWS = 4  # that a thread block of `append` takes
DENSE_PARAMS = Struct(
    "DenseParams",
    "Parameters of one launch; passed by value. Pointers are device addresses; a kernel reads those that it needs.",
    (
        Field("prompt_ptr", "u64", "uint32 (max_context + largest chunk)"),
        Field("place_ptr", "u64", "int32: start of the chunk; 0, end of its keys"),
        Field("next_start_ptr", "u64", "int32: where the next chunk begins"),
        Field("last_position_ptr", "u64", "int32: position of the prompt's last token"),
        Field("overflow_ptr", "u64", "int32: set to 1 when a value is not finite"),
        Field("embedding_ptr", "u64", "16-bit (vocab, hidden), of the weights' type"),
        Field("rope_ptr", "u64", "float32 (max_context, head_dim / 2, 2): cosine, sine"),
        Field("stream_ptr", "u64", "float32 (size, hidden)"),
        Field("x_ptr", "u64", "binary16 (size, hidden)"),
        Field("left_ptr", "u64", "binary16 (size, hidden): what rounding left of x; 0 = it is not wanted"),
        Field("norm_ptr", "u64", "float32 (hidden): weights of the norm that comes next; 0 = x is not wanted"),
        Field("qkv_ptr", "u64", "float32 (size, lanes * rows)"),
        Field("qkv_bias_ptr", "u64", "float32 (lanes, rows); 0 without biases"),
        Field("head_norms_ptr", "u64", "float32 (2, head_dim): of query heads, of key heads; 0 without such norms"),
        Field("query_ptr", "u64", "binary16 (size, lanes * heads, head_dim)"),
        Field("keys_ptr", "u64", "binary16 (positions, lanes * KV heads, head_dim)"),
        Field("values_ptr", "u64", "like keys"),
        Field("cache_ptr", "u64", "the monokernel's KV caches"),
        Field("cache_number_ptr", "u64", "int32: which of them"),
        Field("gate_up_ptr", "u64", "binary16 (size, lanes, 2, ffn)"),
        Field("activation_ptr", "u64", "binary16 (size, lanes, ffn)"),
        Field("partial_ptr", "u64", "binary16 (lanes, size, hidden)"),
        Field("total_ptr", "u64", "float32 (size, hidden): what is added to the stream; 0 = the lanes' partials"),
        Field("own_sum_ptr", "u64", "float32 (size, hidden)"),
        Field("bias_ptr", "u64", "float32 (hidden), of the first lane's partials; 0 = there is none"),
        Field("last_place_ptr", "u64", "like place, of the prompt's last token; so are the next two"),
        Field("last_stream_ptr", "u64", "float32 (hidden)"),
        Field("last_query_ptr", "u64", "binary16 (lanes * heads, head_dim)"),
        Field("last_streams_ptr", "u64", "float32 (hidden): the token's stream behind the last layer"),
        Field("size", "u32", "rows of the chunk"),
        Field("layer", "u32", "whose keys and values they are"),
        Field("num_row_ctas", "u32", "thread blocks of append that have rows of the chunk"),
        Field("scale", "f32", "of partials"),
        Field("is_ordered", "u32", "1: x is in the order of products (weights.cuh)"),
    ),
)


def dense_header(layout: CacheLayout, *, weight_dtype: str, kv_dtype: str) -> str:
    """`dense_shape.cuh`."""
    spec = layout.spec
    numbers = {
        "kLanes": layout.num_lanes, "kHidden": spec.hidden_size, "kHeads": spec.lane_heads, "kKvHeads": spec.lane_kv_heads,
        "kHeadDim": spec.head_dim, "kRotaryDim": spec.rotary_dim, "kFfn": ffn_columns(spec) or spec.lane_ffn,
        "kMaxContext": spec.max_context, "kUnit": UNIT,
        "kMaxThreads": MAX_THREADS, "kAppendRows": APPEND_ROWS, "kRowThreads": row_threads(spec.hidden_size),
    }  # fmt: skip
    floats = {"kNormEps": spec.norm_eps, "kActivationScale": ACTIVATION_SCALE}
    flags = {"kQkvBias": spec.qkv_bias, "kQkNorm": spec.qk_norm, "kGated": has_gates(spec)}
    lines = [device_header("kog_dist.workers.prefill.dense.dense_abi", (DENSE_PARAMS,)), "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    return "\n".join([*lines, *cache_lines(layout, weight_dtype, kv_dtype), "}  // namespace kog", ""])


def has_gates(spec: ModelSpec) -> bool:
    """Whether outputs of heads are multiplied by gates."""
    return any(isinstance(part, AttentionMixer) and part.gated for part in spec.kinds)


def row_threads(hidden_size: int) -> int:
    """Threads of a thread block that has a row of the stream."""
    return threads_for(hidden_size // UNIT)
