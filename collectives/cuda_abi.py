"""The structs that the host and KCCL's device code share, and the header that kernels are compiled with.

Plain data, passed to kernels by value. Structs that a kernel takes together lie one after the other: sizes are multiples of 8.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kog_dist.runtime.abi import LINE_BYTES, WAIT_RECORD, Field, Struct, WaitOp

MAX_RANKS = 8


class Collects(enum.IntEnum):
    """What an exchange waits for, and what becomes of it."""

    PUBLISH_ONLY = 0
    GATHER = 1
    SUM = 2
    BARRIER_WAIT = 3


class KernelStatus(enum.IntEnum):
    """How the last kernel of a communicator has ended; 0 before the first."""

    OK = 1
    STOPPED = 2


PEERS = Struct(
    "Peers",
    "The symmetric heap as one rank's GPU addresses it.",
    (
        Field("heap_ptr", "u64", "start of every rank's heap, the own one included; 0 beyond the last rank", count=MAX_RANKS),
        Field("rank", "u32", "this rank"),
        Field("num_ranks", "u32", "must equal the kRanks that the kernel was compiled with"),
    ),
)
KCCL_HOST = Struct(
    "KcclHost",
    "Page-locked host memory of one communicator.",
    (
        Field("abort", "u32", "1: leave all waits; writer: host"),
        Field("status", "u32", "KernelStatus of the last kernel; writer: device", align=LINE_BYTES),
        Field("record", "u8", "WaitRecord; writer: device", count=WAIT_RECORD.size_bytes, align=LINE_BYTES),
    ),
    size_multiple=LINE_BYTES,
)
WAITS = Struct(
    "Waits",
    "How a kernel's waits end when nothing arrives.",
    (
        Field("host_ptr", "u64", "KcclHost"),
        Field("mirror_ptr", "u64", "uint32 in device memory: the abort word as this GPU's thread blocks see it"),
        Field("limit_us", "u64", "longest wait"),
    ),
)
EXCHANGE_PARAMS = Struct(
    "ExchangeParams",
    "One host-launched operation on one mailbox slot.",
    (
        Field("values_ptr", "u64", "float32 (length): what this rank publishes, or has published"),
        Field("result_ptr", "u64", "float32 (num_ranks, length) of a gather, (length) of a sum"),
        Field("first_word", "u32", "the mailbox"),
        Field("row_words", "u32", "words from one rank's row to the next"),
        Field("mailbox", "u32", "its index"),
        Field("slot", "u32", "slot"),
        Field("length", "u32", "values"),
        Field("tag", "u32", "epoch as words carry it"),
        Field("publishes", "u32", "1: push the values first"),
        Field("collects", "u32", "Collects"),
    ),
)
CHAIN_PARAMS = Struct(
    "ChainParams",
    "A chain of dependent all-reduces in one launch.",
    (
        Field("bias_ptr", "u64", "float32 (length): this rank's part of every input"),
        Field("total_ptr", "u64", "float32 (length): in: the last total, zeros at first; out: the total of the last step"),
        Field("stamps_ptr", "u64", "uint64 (2): time in ns when the first timed step began and when the last one ended"),
        Field("words_ptr", "u64", "words in which this GPU's thread blocks hand totals to each other, zeroed at first"),
        Field("first_word", "u32", "mailbox of two slots"),
        Field("row_words", "u32", "words from one rank's row to the next"),
        Field("first_epoch", "u32", "epoch of the first step; each launch continues where the last one ended"),
        Field("num_warm", "u32", "steps before the timed ones"),
        Field("num_steps", "u32", "timed steps"),
        Field("spare", "u32", "0"),
    ),
)
HANDOFF_PARAMS = Struct(
    "HandoffParams",
    "The exchange at the end of a token, alone: vectors and candidates, for tests.",
    (
        Field("result_ptr", "u64", "uint32 (num_steps, thread blocks, 4): best score, its id, checksum of all vectors, 0"),
        Field("vector_first_word", "u32", "mailbox of one slot whose rows hold copies of this rank's vector"),
        Field("vector_row_words", "u32", "words from one rank's row to the next"),
        Field("candidate_first_word", "u32", "mailbox of two slots whose rows hold copies of this rank's candidates"),
        Field("candidate_row_words", "u32", "words from one rank's row to the next"),
        Field("first_epoch", "u32", "epoch of the first step"),
        Field("num_steps", "u32", "steps"),
    ),
)
STRUCTS = (WAIT_RECORD, PEERS, KCCL_HOST, WAITS, EXCHANGE_PARAMS, CHAIN_PARAMS, HANDOFF_PARAMS)


def abi_header() -> str:
    """`abi.cuh` of the KCCL kernels, for nvcc and NVRTC (which has no standard headers)."""
    structs = device_header("kog_dist.collectives.cuda_abi", STRUCTS)
    enums = (c_enum("Collects", Collects), c_enum("KernelStatus", KernelStatus))
    return "\n".join((structs, "namespace kog {", *enums, "}  // namespace kog\n"))


def c_enum(name: str, members: Iterable[enum.IntEnum], suffix: str = "") -> str:
    """An enum of device programs: with the suffix `Finish`, NO_MASK is `kNoMaskFinish`."""
    named = (("".join(map(str.capitalize, member.name.split("_"))), member) for member in members)
    return f"enum {name} : unsigned int {{ {', '.join(f'k{camel}{suffix} = {member.value}' for camel, member in named)} }};"


def device_header(generator: str, structs: tuple[Struct, ...]) -> str:
    """These structs as C++ for device compilers; `generator` is named in the first line."""
    types = {
        "uint8_t": "unsigned char",
        "uint32_t": "unsigned int",
        "int32_t": "int",
        "uint64_t": "unsigned long",
        "int64_t": "long",
    }
    head = [f"// Generated by {generator}; do not edit.", "#pragma once", "#ifdef __CUDACC_RTC__"]
    head += [f"typedef {meaning} {name};" for name, meaning in types.items()]
    head += ["#else", "#include <stddef.h>", "#include <stdint.h>", "#endif", ""]
    if WAIT_RECORD in structs:
        head += ["namespace kog {", c_enum("WaitOp", WaitOp, "Op"), "}  // namespace kog", ""]
    return "\n".join([*head, *(struct.c_text() + "\n" for struct in structs)])
