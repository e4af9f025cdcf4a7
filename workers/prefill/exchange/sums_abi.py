"""What allreduce.cu is compiled for, and the parameters of its launches."""

from __future__ import annotations

from kog_dist.collectives.cuda_abi import PEERS, device_header
from kog_dist.runtime.abi import WAIT_RECORD, Field, Struct

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


def sums_header(num_ranks: int) -> str:
    """`allreduce_shape.cuh`."""
    numbers = {"kRanks": num_ranks, "kSumThreads": SUM_THREADS, "kRowTile": ROW_TILE}
    lines = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    structs = device_header("kog_dist.workers.prefill.exchange.sums_abi", (WAIT_RECORD, PEERS, SUM_PARAMS))
    return "\n".join([structs, "namespace kog {", *lines, "}  // namespace kog", ""])
