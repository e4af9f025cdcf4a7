"""The control page: the few words through which supervisor, coordinator and ranks steer each other.

One memfd, made by the supervisor and inherited by everyone; it outlives any rank. Every word has exactly one writer, so that
nothing needs a compare-and-swap (a GPU could not do one on host memory), and different writers have different cache lines.

Memory order: Python has no fences. A 64-bit word goes through a memoryview, which is one aligned 8-byte load or store. Where one
word announces other memory (abort_req after the wait record), this relies on x86 keeping stores in order and loads in order. Data
that matters more checks itself: the request block carries a checksum, each word of a token entry its seq.
"""

from __future__ import annotations

import enum
import time
import zlib
from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np

from kog_dist.abi import (
    CONTROL_HEADER,
    CONTROL_MAGIC,
    LOGIT_BIAS,
    MAX_STOP_IDS,
    RANK_CONTROL,
    REQUEST_BLOCK,
    WAIT_RECORD,
    WaitRecord,
    abi_digest,
)
from kog_dist.decode.masks import MaskSlots, mask_bytes
from kog_dist.decode.ring import TokenRing, ring_bytes
from kog_dist.decode.sampling import UNSHAPED, Shaping
from kog_dist.errors import LaunchError, ProtocolError, RequestError
from kog_dist.memfd import Segment, round_up
from kog_dist.rpc.fields import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from kog_dist.wait import Deadline, FutexWord, WaitResult

COORDINATOR: Final = 0xFFFE  # in place of a rank in `set_abort` and `beat`
NO_RANK: Final = 0xFFFF
IDLE_POLL_S = 0.05  # an idle rank wakes this often to beat and to see an abort or drain

_NUM_BLOCKS = 2
_IGNORE_EOS, _LOGIT_DIGESTS = 1, 2
_U32, _U64 = 2**32, 2**64

_SHAPING_FIELDS = (  # of the request block, with the names that `Shaping` gives them
    "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens",
)  # fmt: skip

_ABORT, _DRAIN = CONTROL_HEADER.word("abort"), CONTROL_HEADER.word("drain")
_DOORBELL, _CANCEL = CONTROL_HEADER.word("doorbell"), CONTROL_HEADER.word("cancel")
_COORDINATOR_BEAT = CONTROL_HEADER.word("coordinator_beat_ns")
_BEAT, _STATE, _DONE = RANK_CONTROL.word("beat_ns"), RANK_CONTROL.word("state"), RANK_CONTROL.word("done_seq")
_PROGRESS = RANK_CONTROL.word("progress")
_KV_CACHES, _KV_RING = RANK_CONTROL.word("num_kv_caches"), RANK_CONTROL.word("kv_ring_positions")
_EPOCHS_WAITED, _WAITED_NS = RANK_CONTROL.word("epochs_waited"), RANK_CONTROL.word("waited_ns")
_CHECK = slice(REQUEST_BLOCK.offsets["check"], REQUEST_BLOCK.offsets["check"] + 8)
_ABORT_REQ = RANK_CONTROL.word("abort_req")


class AbortCause(enum.IntEnum):
    """Why everything is being stopped."""

    NONE = 0
    RANK_DIED = 1
    RANK_STALLED = 2
    COORDINATOR_DIED = 3
    REQUESTED_BY_RANK = 4
    SHUTDOWN = 5
    STARTUP_FAILED = 6


class RankState(enum.IntEnum):
    """What a rank is doing."""

    STARTING = 0
    LOADING = 1
    LINKING = 2
    READY = 3
    RUNNING = 4
    STOPPED = 5
    FAILED = 6


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV caches of every rank. A windowed layer may keep only the newest `ring_positions` of a cache; 0: it keeps all."""

    num_caches: int
    ring_positions: int = 0


@dataclass(slots=True)
class EpochWaits:
    """Values of peers that were not there when a rank first looked for them: how many, and the time until they were, in ns."""

    num_epochs: int = 0
    waited_ns: int = 0


@dataclass(frozen=True, slots=True)
class KvUse:
    """Where a request keeps its keys and values, and what it need not prefill.

    It runs in KV cache `cache`. Cache `source`, often the same one, holds the first `num_cached` tokens of the prompt at the
    positions from 0 on: an engine copies them if the two differ, and goes on behind them. At least one token of the prompt is
    always decoded, for its logits. The coordinator decides, so that all ranks do the same (see workers/kept_caches.py).
    """

    cache: int = 0
    source: int = 0
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What ranks know of a request. `seed` is an unsigned 64-bit number; at most 16 `stop_ids` (the model's end tokens).

    `logprobs`: log-probabilities of every token and of so many alternatives; None = none. `mask_epoch`: 0, or a grammar
    constrains the answer, and its token i is chosen with the mask of epoch `mask_epoch` + i (see decode/masks.py).
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_digests: bool = False
    kv: KvUse = KvUse()
    shaping: Shaping = UNSHAPED
    logprobs: int | None = None
    mask_epoch: int = 0

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that end this answer."""
        return () if self.ignore_eos else self.stop_ids

    @property
    def is_shaped(self) -> bool:
        """Whether rank 0 needs all logits: for anything but greedy and temperature sampling without log-probabilities."""
        return self.logprobs is not None or self.mask_epoch != 0 or self.shaping.is_needed(self.temperature)


def _checked(request: DecodeRequest, max_context: int) -> DecodeRequest:
    """The request, or RequestError `invalid_request` when the block could not hold it."""
    finding = ""
    if not 1 <= len(request.prompt) <= max_context:
        finding = f"the prompt has {len(request.prompt)} tokens, expected 1 to {max_context}"
    elif not 1 <= request.max_tokens < _U32:
        finding = f"max_tokens is {request.max_tokens}, expected at least 1"
    elif not 0 <= request.seed < _U64:
        finding = f"seed is {request.seed}, expected 0 to 2^64 - 1"
    elif len(request.stop_ids) > MAX_STOP_IDS:
        finding = f"there are {len(request.stop_ids)} stop ids, expected at most {MAX_STOP_IDS}"
    elif min(ids := (*request.prompt, *request.stop_ids)) < 0 or max(ids) >= _U32:
        finding = "a token id does not fit into 32 bits"
    elif not 0.0 <= request.temperature < float("inf"):
        finding = f"temperature is {request.temperature}, expected a finite number that is not negative"
    elif not 0 <= request.kv.num_cached < len(request.prompt):
        finding = f"{request.kv.num_cached} of the prompt's {len(request.prompt)} tokens are cached, expected fewer than all"
    elif not (0 <= request.kv.cache < _U32 and 0 <= request.kv.source < _U32):
        finding = f"the KV caches {request.kv.cache} and {request.kv.source} do not exist"
    elif request.logprobs is not None and not 0 <= request.logprobs <= MAX_TOP_LOGPROBS:
        finding = f"logprobs is {request.logprobs}, expected 0 to {MAX_TOP_LOGPROBS}"
    elif not 0 <= request.mask_epoch < _U64:
        finding = f"mask_epoch is {request.mask_epoch}, expected 0 to 2^64 - 1"
    elif not all(0 <= token_id < _U32 for token_id, _ in request.shaping.logit_bias):
        finding = "an id of logit_bias does not fit into 32 bits"
    if finding:
        raise RequestError("invalid_request", f"cannot submit the request: {finding}")
    return request


def _bias_offset(max_context: int) -> int:
    """Bytes from a request block to its LogitBias array: behind the room for the longest prompt."""
    return round_up(REQUEST_BLOCK.size_bytes + 4 * max_context, 8)


class ControlPage:
    """One process's view of the control page. `create` in the supervisor, `from_fd` everywhere else.

    The methods say who may call them; calling another one's writer breaks the rule of one writer per word.
    """

    def __init__(self, segment: Segment) -> None:
        header = np.frombuffer(segment.buffer, CONTROL_HEADER.dtype, count=1)[0].copy()
        if int(header["magic"]) != CONTROL_MAGIC or int(header["abi_digest"]) != abi_digest():
            raise LaunchError(f"descriptor {segment.fd} is not a control page of this build; start all from one version")
        if int(header["total_bytes"]) != segment.size_bytes:
            raise LaunchError(f"the control page has {segment.size_bytes} bytes and says {int(header['total_bytes'])}")
        self.world_size = int(header["world_size"])
        self.max_context = int(header["max_context"])
        self.generation = int(header["generation"])
        self._segment = segment
        self._words = segment.words()
        self._rank_base = int(header["rank_offset"]) // 8
        self._request_offset, self._request_stride = int(header["request_offset"]), int(header["request_stride"])
        self._doorbell_futex = FutexWord(segment.buffer, 8 * _DOORBELL)
        self.ring = TokenRing(segment, int(header["ring_offset"]), self.max_context)
        self.masks = MaskSlots(segment, int(header["mask_offset"]), int(header["vocab_size"]))

    @classmethod
    def create(cls, world_size: int, max_context: int, generation: int = 1, *, vocab_size: int = 0) -> ControlPage:
        """A new page for `world_size` ranks, whose heartbeats start now. `generation` counts the starts of an engine, from 1.

        Without a `vocab_size` there is no room for masks.
        """
        rank_offset = CONTROL_HEADER.size_bytes
        request_offset = rank_offset + round_up(world_size * RANK_CONTROL.size_bytes)
        request_stride = round_up(_bias_offset(max_context) + MAX_LOGIT_BIAS * LOGIT_BIAS.size_bytes)
        ring_offset = request_offset + _NUM_BLOCKS * request_stride
        mask_offset = ring_offset + ring_bytes(max_context)
        segment = Segment.create("kog-control", mask_offset + mask_bytes(vocab_size))
        header = segment.array(CONTROL_HEADER.dtype, 1)
        header["abi_digest"] = abi_digest()
        header["generation"] = generation
        header["world_size"], header["max_context"] = world_size, max_context
        header["total_bytes"], header["rank_offset"] = segment.size_bytes, rank_offset
        header["request_offset"], header["request_stride"] = request_offset, request_stride
        header["ring_offset"] = ring_offset
        header["mask_offset"], header["vocab_size"] = mask_offset, vocab_size
        header["magic"] = CONTROL_MAGIC
        del header
        page = cls(segment)
        for rank in range(world_size):
            page.beat(rank)
        return page

    @classmethod
    def from_fd(cls, fd: int) -> ControlPage:
        """The page behind an inherited descriptor, which the page owns from now on. LaunchError when it is something else."""
        segment = Segment.from_fd(fd)
        if segment.size_bytes < CONTROL_HEADER.size_bytes:
            raise LaunchError(f"descriptor {fd} is not a control page: it has only {segment.size_bytes} bytes")
        return cls(segment)

    @property
    def fd(self) -> int:
        """The descriptor; children get it through `pass_fds`."""
        return self._segment.fd

    # --- supervisor ------------------------------------------------------------------------------------------------------------

    def set_abort(self, cause: AbortCause, rank: int = NO_RANK) -> None:
        """Stop everything. The first cause stays; wakes idle ranks. Writer: supervisor."""
        if self._words[_ABORT] == 0:
            self._words[_ABORT] = self.generation << 32 | int(cause) << 16 | rank
        self._doorbell_futex.wake()

    def aborted(self) -> bool:
        """Whether everything must stop. One load; fit for polling."""
        return bool(self._words[_ABORT])

    def abort(self) -> tuple[AbortCause, int] | None:
        """The cause and the rank it names (NO_RANK, COORDINATOR), or None."""
        word = self._words[_ABORT]
        return (AbortCause(word >> 16 & 0xFFFF), word & 0xFFFF) if word else None

    def set_drain(self) -> None:
        """Finish what runs and take nothing new. Writer: supervisor."""
        self._words[_DRAIN] = 1
        self._doorbell_futex.wake()

    def draining(self) -> bool:
        """Whether the engine is to finish and stop."""
        return bool(self._words[_DRAIN])

    # --- coordinator -----------------------------------------------------------------------------------------------------------

    def submit(self, request: DecodeRequest) -> int:
        """Hand a request to the ranks; returns its seq, from 1. Writer: coordinator.

        The block is written completely before the doorbell. Two blocks are used in turn: submit request n + 2 only when every
        rank has read request n (`all_done`). Raises RequestError for values that the block cannot hold.
        """
        _checked(request, self.max_context)
        seq = self._words[_DOORBELL] + 1
        flags = _IGNORE_EOS * request.ignore_eos | _LOGIT_DIGESTS * request.logit_digests
        raw = bytearray(REQUEST_BLOCK.size_bytes)  # bytes decide, numpy may skip padding when it copies a struct
        block = np.frombuffer(raw, REQUEST_BLOCK.dtype)
        block["seq"], block["seed"], block["temperature"] = seq, request.seed, request.temperature
        block["num_prompt"], block["max_tokens"], block["flags"] = len(request.prompt), request.max_tokens, flags
        block["num_stop_ids"] = len(request.stop_ids)
        block["stop_ids"][0, : len(request.stop_ids)] = request.stop_ids
        block["kv_cache"], block["kv_source"], block["num_cached"] = request.kv.cache, request.kv.source, request.kv.num_cached
        shaping = request.shaping
        for name in _SHAPING_FIELDS:
            block[name] = getattr(shaping, name)
        block["num_logit_bias"] = len(shaping.logit_bias)
        block["mask_epoch"] = request.mask_epoch
        block["logprobs"] = 0 if request.logprobs is None else request.logprobs + 1
        prompt = array("I", request.prompt).tobytes()  # in a third of NumPy's time
        biases = np.array(list(shaping.logit_bias), LOGIT_BIAS.dtype).tobytes()
        block["check"] = zlib.crc32(biases, zlib.crc32(prompt, zlib.crc32(raw)))
        start = self._request_offset + seq % _NUM_BLOCKS * self._request_stride
        for offset, part in ((0, bytes(raw)), (REQUEST_BLOCK.size_bytes, prompt), (_bias_offset(self.max_context), biases)):
            self._segment.buffer[start + offset : start + offset + len(part)] = part
        self._words[_DOORBELL] = seq
        self._doorbell_futex.wake()
        return seq

    def cancel(self, seq: int) -> None:
        """Cancel request `seq` and all before it. Writer: coordinator."""
        self._words[_CANCEL] = max(seq, self._words[_CANCEL])

    def cancelled(self, seq: int) -> bool:
        """Whether request `seq` was cancelled. Ranks see it at different times: rank 0 decides and tells the others."""
        return bool(self._words[_CANCEL] >= seq)

    # --- ranks -----------------------------------------------------------------------------------------------------------------

    def doorbell(self) -> int:
        """Seq of the newest request, 0 before the first."""
        return int(self._words[_DOORBELL])

    def wait_doorbell(self, rank: int, seen: int, deadline: Deadline | None = None) -> WaitResult:
        """Block in the kernel until a request newer than `seen` is there (OK), or ABORT, or TIMEOUT; beats meanwhile."""
        deadline = deadline or Deadline.never()
        while True:
            self.beat(rank)
            doorbell = self.doorbell()
            if self.aborted():
                return WaitResult.ABORT
            if doorbell > seen:
                return WaitResult.OK
            if deadline.expired():
                return WaitResult.TIMEOUT
            self._doorbell_futex.wait(doorbell, min(IDLE_POLL_S, deadline.remaining_s()))

    def read_request(self, seq: int) -> DecodeRequest:
        """Request `seq`, complete or not at all: ProtocolError when the block is damaged or already holds another request."""
        start = self._request_offset + seq % _NUM_BLOCKS * self._request_stride

        def copy(offset: int, size_bytes: int) -> bytes:  # what is checked is what is used
            return self._segment.buffer[start + offset : start + offset + size_bytes]

        raw = bytearray(copy(0, REQUEST_BLOCK.size_bytes))
        row = np.frombuffer(raw, REQUEST_BLOCK.dtype)[0]
        num_prompt, num_biases, check = int(row["num_prompt"]), int(row["num_logit_bias"]), int(row["check"])
        prompt = copy(REQUEST_BLOCK.size_bytes, 4 * min(num_prompt, self.max_context))
        biases = copy(_bias_offset(self.max_context), LOGIT_BIAS.size_bytes * min(num_biases, MAX_LOGIT_BIAS))
        raw[_CHECK] = bytes(8)
        is_whole = len(prompt) == 4 * num_prompt and len(biases) == LOGIT_BIAS.size_bytes * num_biases
        if int(row["seq"]) != seq or check != zlib.crc32(biases, zlib.crc32(prompt, zlib.crc32(raw))) or not is_whole:
            raise ProtocolError(f"request {seq} was not complete in its block, which holds request {int(row['seq'])}")
        flags = int(row["flags"])
        shaping = {name: row[name].item() for name in _SHAPING_FIELDS}
        logit_bias = tuple(np.frombuffer(biases, LOGIT_BIAS.dtype).tolist())
        return DecodeRequest(
            prompt=tuple(np.frombuffer(prompt, "<u4").tolist()),
            max_tokens=int(row["max_tokens"]),
            temperature=float(row["temperature"]),
            seed=int(row["seed"]),
            stop_ids=tuple(row["stop_ids"][: int(row["num_stop_ids"])].tolist()),
            ignore_eos=bool(flags & _IGNORE_EOS),
            logit_digests=bool(flags & _LOGIT_DIGESTS),
            kv=KvUse(int(row["kv_cache"]), int(row["kv_source"]), int(row["num_cached"])),
            shaping=Shaping(**shaping, logit_bias=logit_bias),
            logprobs=int(row["logprobs"]) - 1 if int(row["logprobs"]) else None,
            mask_epoch=int(row["mask_epoch"]),
        )

    def beat(self, rank: int) -> None:
        """Say that `rank` (or COORDINATOR) is alive and not stuck. Writer: the rank itself."""
        self._words[self._beat_word(rank)] = time.monotonic_ns()

    def beat_age_s(self, rank: int) -> float:
        """Seconds since the last heartbeat of `rank` (or COORDINATOR); 0 before the first one: start-up has its own deadline."""
        last_ns = self._words[self._beat_word(rank)]
        return (time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0

    def set_state(self, rank: int, state: RankState) -> None:
        """Say what `rank` is doing. Writer: the rank itself."""
        self._words[self._rank_word(rank, _STATE)] = int(state)

    def state(self, rank: int) -> RankState:
        """What `rank` last said that it was doing."""
        return RankState(self._words[self._rank_word(rank, _STATE)])

    def set_done(self, rank: int, seq: int) -> None:
        """Say that `rank` has finished with request `seq` and all before it. Writer: the rank itself."""
        self._words[self._rank_word(rank, _DONE)] = seq

    def all_done(self, seq: int) -> bool:
        """Whether every rank has finished with request `seq`."""
        return all(self._words[self._rank_word(rank, _DONE)] >= seq for rank in range(self.world_size))

    def set_kv_layout(self, rank: int, layout: KvLayout) -> None:
        """Say which KV caches `rank` has, before it is ready. Writer: the rank itself."""
        self._words[self._rank_word(rank, _KV_CACHES)] = layout.num_caches
        self._words[self._rank_word(rank, _KV_RING)] = layout.ring_positions

    def kv_layout(self) -> KvLayout:
        """The KV caches of rank 0, like those of all ranks; none before it is ready."""
        return KvLayout(self._words[self._rank_word(0, _KV_CACHES)], self._words[self._rank_word(0, _KV_RING)])

    def set_progress(self, rank: int, seq: int, num_positions: int) -> None:
        """Say how many positions of request `seq` the KV cache of `rank` holds. Writer: the rank itself."""
        self._words[self._rank_word(rank, _PROGRESS)] = (seq & 0xFFFFFFFF) << 32 | num_positions

    def progress(self, seq: int) -> int | None:
        """Positions of request `seq` that rank 0 holds; None before it has begun, and after a later one has."""
        word = self._words[self._rank_word(0, _PROGRESS)]
        return word & 0xFFFFFFFF if word >> 32 == seq & 0xFFFFFFFF else None

    def set_epoch_waits(self, rank: int, waits: EpochWaits) -> None:
        """Say how often and how long `rank` has waited for peers; both only grow. Writer: the rank itself."""
        self._words[self._rank_word(rank, _WAITED_NS)] = waits.waited_ns
        self._words[self._rank_word(rank, _EPOCHS_WAITED)] = waits.num_epochs + 1

    def epoch_waits(self, rank: int) -> EpochWaits | None:
        """What `rank` last said of its waits; None when it does not count them (device programs), or not yet."""
        counted = self._words[self._rank_word(rank, _EPOCHS_WAITED)]
        return EpochWaits(counted - 1, self._words[self._rank_word(rank, _WAITED_NS)]) if counted else None

    def request_abort(self, rank: int, record: WaitRecord | None = None) -> None:
        """Ask the supervisor to stop everything; the first record of a rank stays. Writer: the rank itself."""
        word = self._rank_word(rank, _ABORT_REQ)
        if self._words[word]:
            return
        if record is not None:
            start = 8 * self._rank_word(rank, 0) + RANK_CONTROL.offsets["record"]
            self._segment.buffer[start : start + WAIT_RECORD.size_bytes] = record.pack()
        self._words[word] = self.generation << 32 | 2 * (record is not None) | 1

    def abort_requests(self) -> list[tuple[int, WaitRecord | None]]:
        """The ranks that asked for an abort, each with what it had waited for."""
        found: list[tuple[int, WaitRecord | None]] = []
        for rank in range(self.world_size):
            word = self._words[self._rank_word(rank, _ABORT_REQ)]
            start = 8 * self._rank_word(rank, 0) + RANK_CONTROL.offsets["record"]
            if word:
                raw = self._segment.buffer[start : start + WAIT_RECORD.size_bytes]
                found.append((rank, WaitRecord.unpack(raw) if word & 2 else None))
        return found

    # ---------------------------------------------------------------------------------------------------------------------------

    def _rank_word(self, rank: int, word: int) -> int:
        if not 0 <= rank < self.world_size:
            raise IndexError(f"rank {rank} is not one of the {self.world_size} ranks of the control page")
        return self._rank_base + rank * (RANK_CONTROL.size_bytes // 8) + word

    def _beat_word(self, rank: int) -> int:
        return _COORDINATOR_BEAT if rank == COORDINATOR else self._rank_word(rank, _BEAT)

    def close(self) -> None:
        """Unmap the page in this process. Nothing may be called afterwards."""
        self.ring.close()
        self.masks.close()
        self._doorbell_futex.close()
        self._words.release()
        self._segment.close()
