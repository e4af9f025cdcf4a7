"""Every fixed-layout struct that processes share, and later CUDA, from one definition each.

A `Struct` gives the numpy dtype, the offsets and the C text of one layout: little-endian, naturally aligned, padded at the end.
`c_header()` is the same layouts as C with a static_assert for every offset, so that a compiler disagrees loudly.
Words with different writers stand on different cache lines of 128 bytes.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import time
from functools import cached_property
from typing import Any

from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.late_numpy import np
from kog_dist.records import dataclass
from kog_dist.sampling_params import DEFAULTS, HELP, MAX_TOP_LOGPROBS

ABI_VERSION = 1
LINE_BYTES = 128
MAX_STOP_IDS = 16
LABEL_BYTES = 24
MOST_PARALLEL = 8  # requests that may decode together, each in a decode slot
NO_PEER = 0xFFFFFFFF  # `WaitRecord.peer` where it is not known who was late

_C_TYPES = {
    "u64": "uint64_t",
    "i64": "int64_t",
    "u32": "uint32_t",
    "i32": "int32_t",
    "f64": "double",
    "f32": "float",
    "u8": "uint8_t",
}
_SIZES = {"u64": 8, "i64": 8, "u32": 4, "i32": 4, "f64": 8, "f32": 4, "u8": 1}
_NUMPY = {"u64": "<u8", "i64": "<i8", "u32": "<u4", "i32": "<i4", "f64": "<f8", "f32": "<f4", "u8": "u1"}
_PACKED = {"u64": "Q", "i64": "q", "u32": "I", "i32": "i", "f64": "d", "f32": "f", "u8": "B"}  # of the module `struct`


@dataclass(frozen=True, slots=True)
class Field:
    """One member: `count` items of `type`. `align` may ask for more than the natural alignment (a new cache line)."""

    name: str
    type: str
    doc: str
    count: int = 1
    align: int = 1


@dataclass(frozen=True)
class Struct:
    """One layout. `size_multiple` pads the end, so that arrays of it keep their alignment."""

    name: str
    doc: str
    fields: tuple[Field, ...]
    size_multiple: int = 8

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of every field."""
        offsets: dict[str, int] = {}
        end = 0
        for field in self.fields:
            align = max(field.align, _SIZES[field.type])
            offsets[field.name] = -(-end // align) * align
            end = offsets[field.name] + _SIZES[field.type] * field.count
        return offsets

    @cached_property
    def size_bytes(self) -> int:
        """Size with the padding at the end."""
        last = self.fields[-1]
        end = self.offsets[last.name] + _SIZES[last.type] * last.count
        return -(-end // self.size_multiple) * self.size_multiple

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The same layout for numpy."""
        formats = [_NUMPY[f.type] if f.count == 1 else (_NUMPY[f.type], (f.count,)) for f in self.fields]
        names = [f.name for f in self.fields]
        offsets = [self.offsets[name] for name in names]
        return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": self.size_bytes})

    @cached_property
    def packer(self) -> struct.Struct:
        """The same layout for `struct`: a value for each field in order, of an array its bytes. Packing fills up with zeros.

        For a record that is read or written once; numpy takes some ten times as long, a field after the other.
        """
        text, end = "<", 0
        for field in self.fields:
            num_bytes = _SIZES[field.type] * field.count
            packed = _PACKED[field.type] if field.count == 1 else f"{num_bytes}s"
            text += f"{self.offsets[field.name] - end}x{packed}"
            end = self.offsets[field.name] + num_bytes
        return struct.Struct(f"{text}{self.size_bytes - end}x")

    def word(self, name: str) -> int:
        """Index of a 64-bit field in an array of 64-bit words that starts where the struct starts."""
        offset = self.offsets[name]
        assert offset % 8 == 0, f"{self.name}.{name} is not a word"
        return offset // 8

    def c_text(self) -> str:
        """The struct as C, padding written out, followed by its static_asserts."""
        lines = [f"// {self.doc}", f"typedef struct Kog{self.name} {{"]
        end = 0
        for field in self.fields:
            offset = self.offsets[field.name]
            if offset > end:
                lines.append(f"    uint8_t _pad{end}[{offset - end}];")
            suffix = f"[{field.count}]" if field.count > 1 else ""
            lines.append(f"    {_C_TYPES[field.type]} {field.name}{suffix};  // {field.doc}")
            end = offset + _SIZES[field.type] * field.count
        if self.size_bytes > end:
            lines.append(f"    uint8_t _pad{end}[{self.size_bytes - end}];")
        lines.append(f"}} Kog{self.name};")
        lines.append("#ifndef __CUDACC_RTC__  // NVRTC has no offsetof in constant expressions")
        for name, offset in self.offsets.items():
            lines.append(f'static_assert(offsetof(Kog{self.name}, {name}) == {offset}, "{self.name}.{name}");')
        lines.append("#endif")
        lines.append(f'static_assert(sizeof(Kog{self.name}) == {self.size_bytes}, "{self.name}");')
        return "\n".join(lines)


CONTROL_HEADER = Struct(
    "ControlHeader",
    "First page of the control page.",
    (
        Field("magic", "u64", "CONTROL_MAGIC"),
        Field("abi_digest", "u64", "abi_digest() of the build that made the page"),
        Field("generation", "u64", "counts the starts of this engine; part of the abort word"),
        Field("world_size", "u32", "number of ranks"),
        Field("max_context", "u32", "most tokens of prompt and answer together; length of the token ring"),
        Field("total_bytes", "u64", "size of the whole segment"),
        Field("rank_offset", "u64", "byte offset of RankControl[world_size]"),
        Field("request_offset", "u64", "byte offset of two request blocks, used in turn"),
        Field("request_stride", "u64", "bytes from one request block, with all that follows it, to the next"),
        Field("ring_offset", "u64", "byte offset of RingHeader, then TokenEntry[max_context], then LogprobEntry[max_context]"),
        Field("mask_offset", "u64", "byte offset of two slots of MaskWord[(vocab_size + 31) / 32], used in turn"),
        Field("parallel", "u64", "decode slots; each has a ring and masks of its own, one behind the other"),
        Field("vocab_size", "u64", "ids that a mask has a bit for"),
        Field("abort", "u64", "0, or generation << 32 | cause << 16 | rank; writer: supervisor, once", align=LINE_BYTES),
        Field("drain", "u64", "1: take no new requests, finish what runs; writer: supervisor"),
        Field("doorbell", "u64", "seq of the newest complete request block; writer: coordinator", align=LINE_BYTES),
        Field("cancel", "u64", "of each decode slot requests up to this seq are cancelled; writer: coordinator", MOST_PARALLEL),
        Field("newest", "u64", "seq of the newest request of each decode slot; writer: coordinator", MOST_PARALLEL),
        Field("coordinator_beat_ns", "u64", "CLOCK_MONOTONIC of the last heartbeat; writer: coordinator"),
    ),
    size_multiple=4096,
)
WAIT_RECORD = Struct(
    "WaitRecord",
    "What a wait that ran out of time was waiting for.",
    (
        Field("rank", "u32", "the rank that waited"),
        Field("cta", "u32", "1 + its thread block; 0 on CPU ranks"),
        Field("phase", "u32", "1 + the Phase (decode/plan/steps.py) whose input or sum was waited for; 0: not known"),
        Field("layer", "u32", "1 + its layer; 0: none"),
        Field("lane", "u32", "1 + its lane, among those of the rank; 0: none. In the upper 16 bits 1 + its expert"),
        Field("op", "u32", "WaitOp"),
        Field("mailbox", "u32", "index of the mailbox in the order of declaration"),
        Field("slot", "u32", "slot of the mailbox"),
        Field("peer", "u32", "first rank whose value was missing"),
        Field("num_missing", "u32", "words that did not carry the epoch"),
        Field("epoch_wanted", "u64", "tag that was waited for"),
        Field("epoch_seen", "u64", "tag that stood there instead"),
        Field("elapsed_ns", "u64", "how long the wait lasted"),
        Field("stamp_ns", "u64", "CLOCK_MONOTONIC at its end; 0 on devices"),
        Field("label", "u8", "name of the mailbox, cut off, zero-padded; empty on devices", count=LABEL_BYTES),
    ),
    size_multiple=LINE_BYTES,
)
RANK_CONTROL = Struct(
    "RankControl",
    "What one rank writes. Nobody else writes here.",
    (
        Field("beat_ns", "u64", "CLOCK_MONOTONIC of the last heartbeat"),
        Field("state", "u64", "RankState"),
        Field("read_seq", "u64", "newest request the rank has read"),
        Field(
            "progress", "u64", "seq << 32 | positions of the request of each decode slot that its KV cache holds", MOST_PARALLEL
        ),
        Field("num_kv_caches", "u64", "KV caches that requests may run in; 0 before the rank is ready"),
        Field("kv_ring_positions", "u64", "positions that windowed layers keep before they overwrite the oldest; 0: all"),
        Field("kv_block_tokens", "u64", "positions of a block of the block pool; 0: there is none"),
        Field("kv_num_slots", "u64", "blocks that the pool has room for in the device's memory"),
        Field("kv_num_host_slots", "u64", "and behind these in the host's"),
        Field("kv_num_states", "u64", "copies of states that the pool has room for"),
        Field("kv_num_host_states", "u64", "and behind these in the host's memory"),
        Field("kv_state_stride", "u64", "tokens of a prompt that change a state together: it is copied behind all of them"),
        Field("epochs_waited", "u64", "1 + epochs of peers not there at the first look, as in EpochWaits; 0: not counted"),
        Field("waited_ns", "u64", "how long it waited for them, all together"),
        Field("heeds_rousing", "u64", "1: when idle it watches the doorbell for a moment once roused", align=LINE_BYTES),
        Field("stages_ns", "u64", "CLOCK_MONOTONIC of each RankStage, of each decode slot's newest with it", 6 * MOST_PARALLEL),
        Field("has_prefill", "u64", "1: prompts go through prefill, in blocks of many tokens; 0: by the decoder"),
        Field("startup", "u64", "StartReport of a rank that is not ready yet", align=LINE_BYTES),
        Field("device_beat", "u64", "steps begun by the device program; 0 on CPU ranks", align=LINE_BYTES),
        Field("abort_req", "u64", "0, or generation << 32 | 2 * has_record | 1; written after the record", align=LINE_BYTES),
        Field("record", "u8", "WaitRecord", count=WAIT_RECORD.size_bytes, align=LINE_BYTES),
    ),
    size_multiple=512,
)
PLAIN_PARAMS = tuple(name for name in DEFAULTS if name not in ("logit_bias", "logprobs"))  # those that a block holds as they are
_SAMPLING_KINDS = {int: "u64", float: "f64"}
REQUEST_BLOCK = Struct(
    "RequestBlock",
    "One request, as ranks see it; uint32_t prompt[max_context], LogitBias[], KvCopy[], uint32_t prediction[max_context] follow. "
    "`check` covers all.",
    (
        Field("seq", "u64", "number of the request, from 1"),
        Field("check", "u64", "CRC-32 of the block, the prompt ids, the biases and the copies, taken with check = 0"),
        Field("num_prompt", "u32", "prompt ids that follow"),
        Field("max_tokens", "u32", "most tokens to generate"),
        Field(
            "flags", "u32", "1: ignore stop ids, 2: a digest of the logits with every token, 4: only copies, no answer, 8: drafts"
        ),
        Field("num_stop_ids", "u32", "used entries of stop_ids"),
        Field("stop_ids", "u32", "token ids that end the answer", count=MAX_STOP_IDS),
        Field("decode_slot", "u32", "decode slot that the request has until its last token entry"),
        Field("kv_cache", "u32", "KV cache that the request runs in"),
        Field("kv_source", "u32", "KV cache that holds the prompt's beginning already"),
        Field("num_cached", "u32", "positions of it that count"),
        Field("num_kv_copies", "u32", "used entries of the KvCopy array behind the LogitBias array"),
        *(Field(name, _SAMPLING_KINDS[type(DEFAULTS[name])], HELP[name]) for name in PLAIN_PARAMS),
        Field("num_logit_bias", "u32", "used entries of the LogitBias array behind the prompt's room"),
        Field("logprobs", "u32", "0: none wanted; n + 1: of every token, and of the n best"),
        Field("mask_epoch", "u64", "epoch of the mask for the first token of the answer; 0: no masks"),
        Field("num_prediction", "u32", "ids of what the client expects the answer to be"),
    ),
    size_multiple=LINE_BYTES,
)
LOGIT_BIAS = Struct(
    "LogitBias",
    "Added to the logit of one id.",
    (Field("token_id", "u32", "each id once"), Field("bias", "f32", "from -100 to 100")),
)
KV_COPY = Struct(
    "KvCopy",
    "A copy between a KV cache and the block pool; see kog_dist/decode/request.py.",
    (
        Field("kind", "u32", "KvCopyKind"),
        Field("slot", "u32", "of the pool"),
        Field("place", "u32", "block of the cache, or slot"),
        Field("spare", "u32", "0"),
    ),
)
MASK_WORD = Struct(
    "MaskWord",
    "32 bits of a mask of the vocabulary, lowest id first, and its epoch; writer: the grammar process.",
    (Field("bits_and_epoch", "u64", "bits | epoch << 32"),),
)
RING_HEADER = Struct(
    "RingHeader",
    "Written by rank 0.",
    (Field("num_put", "u64", "entries put or announced since the start; only a hint that wakes the reader"),),
    size_multiple=4096,
)
TOKEN_ENTRY = Struct(
    "TokenEntry",
    "One generated token. Each word is payload | seq << 32; an entry counts when all its words carry the seq: no fences.",
    (
        Field("token_id", "u64", "the token, 0xffffffff for none"),
        Field("index", "u64", "place of the token in the answer, from 0; several per step are several entries"),
        Field("finish", "u64", "Finish; not 0: this entry is the last"),
        Field("flags", "u64", "1: digest is valid, 2: the LogprobEntry of the same index belongs to it"),
        Field("stamp_low", "u64", "CLOCK_MONOTONIC in ns when the token was known, low half"),
        Field("stamp_high", "u64", "high half"),
        Field("drafted", "u64", "tokens drafted in the pass that this entry is the last of; 2^16 more: of the prediction"),
        Field("accepted", "u64", "of them those that were right"),
        Field("digest", "u64", "SHA-256 of the float32 logits, 4 bytes a word", count=8),
    ),
    size_multiple=LINE_BYTES,
)
LOGPROB_ENTRY = Struct(
    "LogprobEntry",
    "Log-probabilities of one token, apart from TokenEntry so that plain decoding writes one line. Words as there; those of "
    "alternatives beyond num_top are not read and need not be written.",
    (
        Field("num_top", "u64", "alternatives"),
        Field("chosen", "u64", "bits of the float32 log-probability of the token itself"),
        Field("top_ids", "u64", "the most likely ids, best first", count=MAX_TOP_LOGPROBS),
        Field("top_logprobs", "u64", "bits of their float32 log-probabilities", count=MAX_TOP_LOGPROBS),
    ),
    size_multiple=LINE_BYTES,
)

STRUCTS = (
    CONTROL_HEADER, WAIT_RECORD, RANK_CONTROL, REQUEST_BLOCK, LOGIT_BIAS, KV_COPY, MASK_WORD, RING_HEADER, TOKEN_ENTRY,
    LOGPROB_ENTRY,
)  # fmt: skip
CONTROL_MAGIC = int.from_bytes(b"KOGCTRL\0", "little")


def c_header() -> str:
    """All structs as a C11 / C++ header."""
    head = "// Generated by kog_dist.runtime.abi; do not edit.\n#pragma once\n"
    head += "".join(f"#include <{name}.h>\n" for name in ("assert", "stddef", "stdint"))
    constants = f"#define KOG_ABI_VERSION {ABI_VERSION}\n#define KOG_CONTROL_MAGIC {CONTROL_MAGIC:#x}ull\n"
    return "\n".join([head + constants, *(layout.c_text() + "\n" for layout in STRUCTS)])


def abi_digest() -> int:
    """64 bits that differ when any layout differs; two builds that disagree refuse each other's memory."""
    return int.from_bytes(hashlib.sha256(c_header().encode()).digest()[:8], "little")


class WaitOp(enum.IntEnum):
    """What kind of wait a record describes."""

    UNKNOWN = 0
    COLLECT = 1
    BARRIER = 2


_COUNTED_FROM_1 = ("cta", "phase", "layer", "lane")  # of a record: zeros say nothing
_EXPERT_BIT = 16  # of a record's lane


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A `WAIT_RECORD` as Python sees it, NONE where it says nothing; its text is the message of a DeviceError."""

    rank: int
    op: WaitOp
    mailbox: int
    slot: int
    peer: int
    num_missing: int
    epoch_wanted: int
    epoch_seen: int
    elapsed_ns: int
    label: str = ""
    cta: int = NONE
    phase: int = NONE
    layer: int = NONE
    lane: int = NONE
    expert: int = NONE  # in models with experts the one whose activations or router logit was missing
    stamp_ns: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank}" + (f", thread block {self.cta}" if self.cta != NONE else "")
        words = "1 word" if self.num_missing == 1 else f"{self.num_missing} words"
        late, was = (f"rank {self.peer}", "was") if self.peer != NO_PEER else ("the other ranks", "were")
        return (
            f"{where}: {self._what()} waited {self.elapsed_ns / 1e9:.1f} s for {words} of {late} "
            f"(epoch {self.epoch_wanted} wanted, {self.epoch_seen} seen); look at what {late} {was} doing"
        )

    def _what(self) -> str:
        """What waited: a phase, with its layer and lane, or else a mailbox."""
        if self.op is WaitOp.BARRIER:
            return "a barrier"
        if self.phase not in list(Phase):
            return f"mailbox {self.label!r} slot {self.slot}" if self.label else f"mailbox {self.mailbox} slot {self.slot}"
        phase = Phase(self.phase)
        summed = "the sum of " if phase in (Phase.OUT, Phase.DOWN) and self.lane == NONE else ""
        numbers = (("layer", self.layer), ("lane", self.lane), ("expert", self.expert))
        place = ", ".join(f"{name} {number}" for name, number in numbers if number != NONE)
        return f"{summed}{phase.name}" + (f" of {place}" if place else "")

    def pack(self) -> bytes:
        """The record in the layout of `WAIT_RECORD`; the label is cut to its room."""
        row = {name: getattr(self, name) + (name in _COUNTED_FROM_1) for name in WAIT_RECORD.offsets if name != "label"}
        row["lane"] |= (self.expert + 1) << _EXPERT_BIT
        row["stamp_ns"] = self.stamp_ns or time.monotonic_ns()
        return WAIT_RECORD.packer.pack(*row.values(), self.label.encode()[:LABEL_BYTES])  # the label is the last field

    @classmethod
    def unpack(cls, raw: bytes) -> WaitRecord:
        """The record that `pack` or a device wrote."""
        numbers = dict(zip(WAIT_RECORD.offsets, WAIT_RECORD.packer.unpack(raw), strict=True))
        label, op = numbers.pop("label").rstrip(b"\0").decode(errors="replace"), numbers.pop("op")
        numbers["expert"], numbers["lane"] = divmod(numbers["lane"], 1 << _EXPERT_BIT)
        numbers |= {name: numbers[name] - 1 for name in (*_COUNTED_FROM_1, "expert")}
        return cls(op=WaitOp(op) if op in list(WaitOp) else WaitOp.UNKNOWN, label=label, **numbers)
