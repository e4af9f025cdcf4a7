"""The structs that the CUDA engine and the monokernel share, and the header that the kernel is compiled with."""

from __future__ import annotations

import enum

from kog_dist.collectives.cuda_abi import MAX_RANKS, PEERS, c_enum, device_header
from kog_dist.decode.plan.steps import ON_DEVICES
from kog_dist.runtime.abi import MAX_STOP_IDS, WAIT_RECORD, Field, Struct
from kog_dist.runtime.ring import Finish
from kog_dist.sampling_params import MAX_TOP_LOGPROBS

DECODE_PARAMS = Struct(
    "DecodeParams",
    "Parameters of one launch; passed by value. Pointers are device addresses.",
    (
        Field("tape_ptr", "u64", "16-bit weights, the tapes of all thread blocks"),
        Field("embedding_ptr", "u64", "16-bit (vocab, hidden)"),
        Field("norms_ptr", "u64", "16-bit (layers, 2, lanes or 1, hidden)"),
        Field("final_norm_ptr", "u64", "16-bit (lanes or 1, hidden)"),
        Field("qkv_bias_ptr", "u64", "16-bit (layers, lanes, QKV rows); 0 without biases"),
        Field("experts_ptr", "u64", "16-bit words (layers, experts, words of one); 0 without experts, see expert_shape.py"),
        Field("router_bias_ptr", "u64", "16-bit (layers, experts); 0 without such biases, here and below"),
        Field("gate_up_bias_ptr", "u64", "16-bit (layers, experts, gate and up rows of the hosted lanes in turn)"),
        Field("down_bias_ptr", "u64", "16-bit (layers, experts, hidden): of the sum over lanes"),
        Field("out_bias_ptr", "u64", "16-bit (layers, hidden): of the sum over lanes"),
        Field("sinks_ptr", "u64", "16-bit (layers, lanes, heads); 0 without attention sinks"),
        Field("head_norms_ptr", "u64", "16-bit (layers, 2, head_dim): of query heads, of key heads; 0 without such norms"),
        Field("rope_ptr", "u64", "float32 (max_context, head_dim / 2, 2): cosine, sine"),
        Field("kv_ptr", "u64", "KV cache, zeroed before the first launch"),
        Field("words_ptr", "u64", "words that thread blocks exchange, zeroed before the first launch"),
        Field("logits_ptr", "u64", "float32 (tokens of a pass, rows of this rank), of the last pass that had logits"),
        Field("prompt_ptr", "u64", "uint32 (max_context)"),
        Field("drafts_ptr", "u64", "uint32 (max_context): the token that is expected at each position; 0: none"),
        Field("state_ptr", "u64", "DecodeState"),
        Field("record_ptr", "u64", "WaitRecord"),
        Field("host_ptr", "u64", "HostPage, in pinned host memory"),
        Field("ring_ptr", "u64", "uint64 (max_context, 2) in pinned host memory: token | tag << 32, finish | tag << 32"),
        Field("stamps_ptr", "u64", "uint64 (num_steps): globaltimer at the end of each step; 0 = not wanted"),
        Field("trace_ptr", "u64", "uint64 stamps of a traced build, or hashes or choices of a build with these; else 0"),
        Field("seed", "u64", "seed of the sampling"),
        Field("inverse_temperature_bits", "u32", "float32 1 / temperature; 0 = greedy"),
        Field("wait_limit_us", "u32", "longest wait, at most 2000000"),
        Field("num_steps", "u32", "most steps of this launch"),
        Field("request_tag", "u32", "tag of the request's ring entries; never 0"),
        Field("zero", "u32", "0, which no compiler knows: what is masked with it must have been loaded"),
        Field("vocab_first", "u32", "token id of this rank's first row of the LM head"),
        Field("num_stop_ids", "u32", "used entries of stop_ids"),
        Field("stop_ids", "u32", "token ids that end the answer", count=MAX_STOP_IDS),
    ),
)
DECODE_STATE = Struct(
    "DecodeState",
    "What one launch leaves to the next, in device memory.",
    (
        Field("token", "u32", "token to feed in next"),
        Field("position", "u32", "its position"),
        Field("num_prompt", "u32", "tokens of the prompt"),
        Field("max_tokens", "u32", "most tokens to generate"),
        Field("epoch", "u32", "passes since the words were zeroed"),
        Field("finish", "u32", "Finish; not 0: the launches that follow do nothing"),
        Field("abort_mirror", "u32", "1: leave all waits"),
        Field("num_exchanges", "u32", "of the build with processors since the words were zeroed"),
        Field("num_kept", "u32", "tokens of the last pass that counted, where a pass has several"),
        Field("hash", "u32", "running hash of all tokens and scores, low and high half; in a build with hashes", count=2),
        Field("pass_epoch", "u32", "the same as epoch of the build with several tokens, which has words of its own"),
        Field("pass_tokens", "u32", "tokens of the next pass, of builds with drafts: the other build does nothing"),
        Field(
            "draft_place",
            "u32",
            "where the next token stands if an earlier draft goes on; ~0: nowhere. As in lookup.py, here and below",
        ),
        Field("draft_missed", "u32", "tokens since one was as expected"),
        Field("draft_start", "u32", "where the draft of the next pass stands"),
        Field("draft_tokens", "u32", "how many tokens it has; 0: there is none"),
        Field("draft_idle", "u32", "passes without a draft"),
        Field("draft_balance", "u32", "time that drafts may lose, an int: see pass_drafts.py"),
        Field("draft_looked", "u32", "position of the newest token that was looked up"),
    ),
    size_multiple=128,
)
DRAFT_PARAMS = Struct(
    "DraftParams",
    "What builds with drafts take besides DecodeParams and Peers.",
    (
        Field("tokens_ptr", "u64", "uint32 (prediction, a gap of ~0, max_context of prompt and answer): what is looked up"),
        Field("num_predicted", "u32", "tokens of the prediction"),
        Field("pass_tokens", "u32", "tokens of a pass with drafts"),
        Field("extra", "u32", "what it costs more than one of a token, and"),
        Field("edge", "u32", "what beginning and ending with such passes costs: in parts of kDraftUnit of a pass of one token"),
    ),
)
FORCED_PARAMS = Struct(
    "ForcedParams",
    "What builds with processors and drafts take behind ProcessorParams and DraftParams.",
    (
        Field("forced_ptr", "u64", "what the grammar forces, see runtime/forced.py, in shared host memory"),
        Field("choices_ptr", "u64", "words of exchanges, which builds that take turns share"),
        Field("wait", "u32", "what a right draft costs whose mask is waited for, as `extra` of DraftParams; 0 without a grammar"),
    ),
)
DELTA_PARAMS = Struct(
    "DeltaParams",
    "What builds of models with gated delta nets take behind all others.",
    (
        Field("taps_ptr", "u64", "16-bit (delta nets, lanes, channels, width) of the convolution"),
        Field("factors_ptr", "u64", "16-bit (delta nets, lanes, 2, heads): logarithms of rates, what is added to decays"),
        Field("norm_ptr", "u64", "16-bit (delta nets, value_dim)"),
        Field(
            "state_ptr", "u64", "float32 (delta nets, lanes, items, DeltaShape.item_values); read behind the first token alone"
        ),
        Field("stop_position", "u32", "of builds with drafts: launches end where states are behind so many tokens; ~0: nowhere"),
    ),
)
MAX_SEATS = 4  # requests whose tokens share a pass, each in a seat
COMPANY_PARAMS = Struct(
    "CompanyParams",
    "What builds with tokens of several requests in a pass take besides DecodeParams and Peers: of each seat what DecodeParams "
    "has of a request. There these are not looked at, and state_ptr is of passes: epoch, finish, abort_mirror and num_kept.",
    (
        Field("state_ptr", "u64", "DecodeState: token, position, num_prompt, max_tokens, finish and hash", count=MAX_SEATS),
        Field("prompt_ptr", "u64", "uint32 (max_context)", count=MAX_SEATS),
        Field("ring_ptr", "u64", "uint64 (max_context, 2) in pinned host memory", count=MAX_SEATS),
        Field("host_ptr", "u64", "HostPage, of which cancelled_tag counts, in pinned host memory", count=MAX_SEATS),
        Field("kv_ptr", "u64", "the request's own KV cache", count=MAX_SEATS),
        Field("seed", "u64", "seed of the sampling", count=MAX_SEATS),
        Field("inverse_temperature_bits", "u32", "float32 1 / temperature; 0 = greedy", count=MAX_SEATS),
        Field("request_tag", "u32", "tag of the request's ring entries; never 0", count=MAX_SEATS),
        Field("num_stop_ids", "u32", "used entries of its stop_ids", count=MAX_SEATS),
        Field("stop_ids", "u32", "token ids that end the answer, MAX_STOP_IDS of each seat", count=MAX_SEATS * MAX_STOP_IDS),
        Field("taken", "u32", "a bit for each seat that has a request"),
    ),
)
COMPANY_STATES_PARAMS = Struct(
    "CompanyStatesParams",
    "What builds with tokens of several requests take behind DeltaParams, whose state_ptr they do not look at.",
    (Field("state_ptr", "u64", "as in DeltaParams, of each seat's request", count=MAX_SEATS),),
)
STREAM_THREADS = 256  # of a thread block of kog_publish_streams
STREAM_PARAMS = Struct(
    "StreamParams",
    "Parameters of kog_publish_streams, which a `KogPeers` follows; passed by value. Pointers are device addresses.",
    (
        Field("streams_ptr", "u64", "float32 (lanes, hidden): the streams behind the last layer"),
        Field("invalid_ptr", "u64", "int32: not 0 = there are none; the launches that follow do nothing"),
        Field("words_ptr", "u64", "as in DecodeParams"),
        Field("state_ptr", "u64", "DecodeState, whose epoch is that of the next step"),
    ),
)
PROCESSOR_PARAMS = Struct(
    "ProcessorParams",
    "What the build with processors takes besides DecodeParams and Peers. Rows are those of this rank's slice of the vocabulary.",
    (
        Field("bias_ptr", "u64", "float32 (rows): added to logits"),
        Field("history_ptr", "u64", "uint32 (rows): times in the answer; the highest bit: stands in the prompt"),
        Field("raw_ptr", "u64", "float32 (rows): the newest token's logits, kept until it is reported"),
        Field("mask_ptr", "u64", "MaskWord, two slots in shared host memory"),
        Field("report_ptr", "u64", "uint64 (max_context, REPORT_WORDS) in pinned host memory, with the request's tag; rank 0"),
        Field("mask_epoch", "u64", "epoch of the mask for the first token of the answer"),
        Field("top_p", "u64", "mass that stays, as a fraction of 2^64"),
        Field("num_mask_words", "u32", "words of one mask"),
        Field("flags", "u32", "ProcessorFlag"),
        Field("repetition_bits", "u32", "float32 repetition penalty"),
        Field("frequency_bits", "u32", "float32 frequency penalty"),
        Field("presence_bits", "u32", "float32 presence penalty"),
        Field("lowest_bits", "u32", "float32 least distance from the largest x that min-p keeps"),
        Field("top_k", "u32", "most tokens that stay; 0 = all"),
        Field("min_tokens", "u32", "tokens before the first that may end the answer"),
        Field("num_top", "u32", "alternatives that a report names"),
        Field("first_ids", "u32", "token id of each rank's first row", count=MAX_RANKS),
        Field("cta_rows", "u32", "rows of a thread block of each rank", count=MAX_RANKS),
    ),
)
REPORT_WORDS = -(-(4 + 2 * MAX_TOP_LOGPROBS) // 16) * 16  # mass low, high; largest and chosen logit; pairs of logit and id


class ProcessorFlag(enum.IntFlag):
    """Which parts of the build with processors a request needs."""

    BIASED = 1
    REMEMBERS = 2
    MASKED = 4
    FILTERED = 8
    TOP_P = 16
    REPORTS = 32


class StampKind(enum.IntEnum):
    """What a thread block of a traced build keeps the time of, once for each product."""

    FETCHED = 0  # the slice of matrix warp 0 is in shared memory
    MULTIPLIED = 1
    PUBLISHED = 2
    QUERY_SEEN = 3  # of attention, from here on
    SCORED = 4
    MIXED = 5
    MERGED = 6
    ATTENDED = 7


# In the place of a request's tag among what the host tells: launches of builds with drafts or company are to end behind a pass.
OTHERS_WAIT_TAG = 0xFFFFFFFF

HOST_PAGE = Struct(
    "HostPage",
    "Words that the host writes and one warp of the device reads.",
    (
        Field("abort", "u32", "1: leave all waits"),
        Field("cancelled_tag", "u32", "tag of the request that is to end; 0 = none; or OTHERS_WAIT_TAG"),
    ),
    size_multiple=128,
)
_OF_BUILDS = (
    PROCESSOR_PARAMS,
    STREAM_PARAMS,
    DRAFT_PARAMS,
    FORCED_PARAMS,
    DELTA_PARAMS,
    COMPANY_PARAMS,
    COMPANY_STATES_PARAMS,
)
KERNEL_STRUCTS = (WAIT_RECORD, DECODE_PARAMS, DECODE_STATE, HOST_PAGE, PEERS, *_OF_BUILDS)


def abi_header() -> str:
    """`abi.cuh`: structs and enums as C++ for nvcc and NVRTC (which has no standard headers)."""
    enums = (
        c_enum("Phase", ON_DEVICES, "Phase"),
        c_enum("Finish", Finish, "Finish"),
        c_enum("ProcessorFlag", ProcessorFlag),
        c_enum("StampKind", StampKind),
        f"constexpr unsigned int kStampKinds = {len(StampKind)}, kOthersWaitTag = {OTHERS_WAIT_TAG}u;",
    )
    structs = device_header("kog_dist.workers.cuda.kernel_abi", KERNEL_STRUCTS)
    return "\n".join((structs, "namespace kog {", *enums, "}  // namespace kog\n"))
