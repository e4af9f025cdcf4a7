"""What prefill.cu and allreduce.cu are compiled for, and the parameters of their launches."""

from __future__ import annotations

import math

from kog_dist.collectives.cuda_abi import PEERS, device_header
from kog_dist.runtime.abi import WAIT_RECORD, Field, Struct
from kog_dist.workers.cuda.cache_shape import BATCH
from kog_dist.workers.cuda.kv_format import FORMATS, kv_lines
from kog_dist.workers.prefill.model.buffers import UNIT
from kog_dist.workers.prefill.model.cache_layout import CacheLayout

MAX_THREADS = 512  # of a thread block
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
SUM_PARAMS = Struct(
    "SumParams",
    "Parameters of a launch of allreduce.cu, which a `KogPeers` follows; passed by value. Pointers are device addresses.",
    (
        Field("own_sum_ptr", "u64", "float32 (size, width): sum over the hosted lanes"),
        Field("num_chunks_ptr", "u64", "uint64: chunks that have begun; of share_overflow: its calls"),
        Field("overflow_ptr", "u64", "int32, of share_overflow: set to 1 when a wait was given up, or a peer's is set"),
        Field("stopped_ptr", "u64", "uint32: not 0 = waits end; writer: host, or a wait whose time is up"),
        Field("record_ptr", "u64", "WaitRecord of that wait"),
        Field("limit_ns", "u64", "longest wait"),
        Field("first_word", "u32", "the mailbox of parts, or of overflows; all words count from the start of a heap"),
        Field("row_words", "u32", "words from one rank's row to the next"),
        Field("flag_word", "u32", "first flag in a row"),
        Field("first_slot", "u32", "first slot of this kind of sums"),
        Field("num_slots", "u32", "slots of this kind, used in turn"),
        Field("mailbox", "u32", "its index, for the record"),
        Field("total_word", "u32", "total, float32 (size, width): the sum over all lanes, in the heap of every rank"),
        Field("total_flag_word", "u32", "first of its flags, one for each row tile"),
        Field("total_slot", "u32", "its slot, for the record"),
        Field("total_mailbox", "u32", "index of the mailbox of totals, for the record"),
        Field("per_chunk", "u32", "sums of this kind in a chunk of tokens"),
        Field("index", "u32", "which of them"),
        Field("size", "u32", "rows of the chunk"),
        Field("width", "u32", "values of a row"),
    ),
)
SUM_THREADS = 512
ROW_TILE = 8  # rows that one flag stands for, and that one rank adds up


def threads_for(num_items: int) -> int:
    """Threads of a thread block for so many items, each of which one thread takes: whole warps."""
    return min(MAX_THREADS, -(-num_items // 32) * 32)


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
    lines = [device_header("kog_dist.workers.prefill.prefill_abi", (PREFILL_PARAMS,)), "namespace kog {"]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr float {name} = static_cast<float>({value!r});" for name, value in floats.items()]
    return "\n".join([*lines, *cache_lines(layout, weight_dtype, kv_dtype), "}  // namespace kog", ""])


def cache_lines(layout: CacheLayout, weight_dtype: str, kv_dtype: str) -> list[str]:
    """What cache_place.cuh needs to find keys and values, and the formats of weights and cache."""
    spec = layout.spec
    numbers = {
        "kSplits": layout.splits,
        "kWindowBatches": layout.window_batches,
        "kFullBatches": layout.full_batches,
        "kBatch": BATCH,
    }
    is_windowed = ", ".join("false" if spec.window(layer) is None else "true" for layer in range(spec.num_layers))
    first_batches = ", ".join(map(str, layout.first_batches))
    return [
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        f"constexpr unsigned long long kCacheBytes = {layout.num_bytes}ull;",
        *(["#define KOG_WHOLE_WINDOWS"] if layout.whole_windows else []),
        f"__constant__ const bool kIsWindowed[] = {{{is_windowed}}};",
        f"__constant__ const unsigned long long kFirstBatches[] = {{{first_batches}}};",
        f"using WeightFormat = {FORMATS[weight_dtype]};",
        *kv_lines(kv_dtype, spec.head_dim),
    ]


def sums_header(num_ranks: int) -> str:
    """`allreduce_shape.cuh`."""
    numbers = {"kRanks": num_ranks, "kSumThreads": SUM_THREADS, "kRowTile": ROW_TILE}
    lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    structs = device_header("kog_dist.workers.prefill.prefill_abi", (WAIT_RECORD, PEERS, SUM_PARAMS))
    return "\n".join([structs, "namespace kog {", *lines, "}  // namespace kog", ""])
