"""The structs that the CUDA engine and the monokernel share, and the header that the kernel is compiled with."""

from __future__ import annotations

from kog_dist.abi import MAX_STOP_IDS, WAIT_RECORD, Field, Struct
from kog_dist.collectives.cuda_abi import PEERS, device_header

DECODE_PARAMS = Struct(
    "DecodeParams",
    "Parameters of one launch; passed by value. Pointers are device addresses.",
    (
        Field("tape_ptr", "u64", "16-bit weights, one tape per thread block"),
        Field("embedding_ptr", "u64", "16-bit (vocab, hidden)"),
        Field("norms_ptr", "u64", "16-bit (layers, 2, lanes or 1, hidden)"),
        Field("final_norm_ptr", "u64", "16-bit (lanes or 1, hidden)"),
        Field("rope_ptr", "u64", "float32 (max_context, head_dim / 2, 2): cosine, sine"),
        Field("kv_ptr", "u64", "KV cache, zeroed before the first launch"),
        Field("words_ptr", "u64", "words that thread blocks exchange, zeroed before the first launch"),
        Field("logits_ptr", "u64", "float32 (rows of this rank), of the last token that had logits"),
        Field("prompt_ptr", "u64", "uint32 (max_context)"),
        Field("state_ptr", "u64", "DecodeState"),
        Field("record_ptr", "u64", "WaitRecord"),
        Field("host_ptr", "u64", "HostPage, in pinned host memory"),
        Field("ring_ptr", "u64", "uint64 (max_context, 2) in pinned host memory: token | tag << 32, finish | tag << 32"),
        Field("stamps_ptr", "u64", "uint64 (num_steps): globaltimer at the end of each step; 0 = not wanted"),
        Field("trace_ptr", "u64", "uint64 stamps of a traced build; else 0"),
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
        Field("epoch", "u32", "steps since the words were zeroed"),
        Field("finish", "u32", "Finish; not 0: the launches that follow do nothing"),
        Field("abort_mirror", "u32", "1: leave all waits"),
    ),
    size_multiple=128,
)
HOST_PAGE = Struct(
    "HostPage",
    "Words that the host writes and one warp of the device reads.",
    (
        Field("abort", "u32", "1: leave all waits"),
        Field("cancelled_tag", "u32", "tag of the request that is to end; 0 = none"),
    ),
    size_multiple=128,
)
KERNEL_STRUCTS = (WAIT_RECORD, DECODE_PARAMS, DECODE_STATE, HOST_PAGE, PEERS)


def abi_header() -> str:
    """`abi.cuh`: the structs as C++ for nvcc and NVRTC (which has no standard headers)."""
    return device_header("kog_dist.workers.cuda.kernel_abi", KERNEL_STRUCTS)
