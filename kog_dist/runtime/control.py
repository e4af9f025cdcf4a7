"""The control page: the few words through which supervisor, coordinator and ranks steer each other.

One memfd, made by the supervisor and inherited by everyone; it outlives any rank. Every word has exactly one writer, so that
nothing needs a compare-and-swap (a GPU could not do one on host memory), and different writers have different cache lines.

Memory order: Python has no fences. A 64-bit word goes through a memoryview, which is one aligned 8-byte load or store. Where one
word announces other memory (abort_req after the wait record), this relies on x86 keeping stores in order and loads in order. Data
that matters more checks itself: the request block carries a checksum, each word of a token entry its seq.
"""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Final

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.abi import (
    CONTROL_HEADER,
    CONTROL_MAGIC,
    RANK_CONTROL,
    WAIT_RECORD,
    WaitRecord,
    abi_digest,
)
from kog_dist.runtime.forced import FORCED_BYTES, ForcedSlot
from kog_dist.runtime.masks import MaskSlots, mask_bytes
from kog_dist.runtime.memfd import Segment, round_up
from kog_dist.runtime.request_blocks import NUM_BLOCKS, RequestBlocks, block_bytes
from kog_dist.runtime.ring import TokenRing, ring_bytes
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.startup import StartReport
from kog_dist.runtime.wait import Deadline, FutexWord, WaitResult, wait

COORDINATOR: Final = 0xFFFE  # in place of a rank in `set_abort` and `beat`
NO_RANK: Final = 0xFFFF
ROUSED_SPIN_S = 0.001  # how long a roused rank looks for its request without sleeping
IDLE_POLL_S = 0.05  # an idle rank wakes this often to beat and to see an abort or drain

_ABORT, _DRAIN = CONTROL_HEADER.word("abort"), CONTROL_HEADER.word("drain")
_DOORBELL, _CANCEL = CONTROL_HEADER.word("doorbell"), CONTROL_HEADER.word("cancel")
_NEWEST = CONTROL_HEADER.word("newest")
_COORDINATOR_BEAT = CONTROL_HEADER.word("coordinator_beat_ns")
_BEAT, _STATE, _READ = RANK_CONTROL.word("beat_ns"), RANK_CONTROL.word("state"), RANK_CONTROL.word("read_seq")
_PROGRESS = RANK_CONTROL.word("progress")
_KV_LAYOUT = tuple(  # the fields of KvLayout
    RANK_CONTROL.word(name)
    for name in (
        "num_kv_caches",
        "kv_ring_positions",
        "kv_block_tokens",
        "kv_num_slots",
        "kv_num_host_slots",
        "kv_num_states",
        "kv_state_stride",
        "kv_num_host_states",
    )
)
_HEEDS_ROUSING, _HAS_PREFILL = RANK_CONTROL.word("heeds_rousing"), RANK_CONTROL.word("has_prefill")
_EPOCHS_WAITED, _WAITED_NS = RANK_CONTROL.word("epochs_waited"), RANK_CONTROL.word("waited_ns")
_STARTUP = RANK_CONTROL.word("startup")
_ABORT_REQ, _STAGES = RANK_CONTROL.word("abort_req"), RANK_CONTROL.word("stages_ns")


class AbortCause(enum.IntEnum):
    """Why everything is being stopped."""

    NONE = 0
    RANK_DIED = 1
    RANK_STALLED = 2
    COORDINATOR_DIED = 3
    REQUESTED_BY_RANK = 4
    SHUTDOWN = 5
    STARTUP_FAILED = 6
    INSTANCE_LOST = 7


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
    """The KV caches of every rank, and its block pool. A windowed layer may keep only the newest `ring_positions` of a cache; 0:
    it keeps all. Blocks have `block_tokens` positions, and there are slots for `num_slots` of them in the device's memory, and
    behind these for `num_host_slots` in the host's. `num_states`: copies of a state that every token changes, and behind these
    `num_host_states` in the host's memory. `state_stride`: bits of a state hang on where a prompt's tokens are divided, unless
    between so many of them.
    """

    num_caches: int
    ring_positions: int = 0
    block_tokens: int = 0  # 0: there is no pool
    num_slots: int = 0
    num_host_slots: int = 0
    num_states: int = 0
    state_stride: int = 1
    num_host_states: int = 0


@dataclass(slots=True)
class EpochWaits:
    """Values of peers that were not there when a rank first looked for them: how many, and the time until they were, in ns."""

    num_epochs: int = 0
    waited_ns: int = 0


class ControlPage:
    """One process's view of the control page. `create` in the supervisor, `from_fd` everywhere else.

    The methods say who may call them; calling another one's writer breaks the rule of one writer per word.
    """

    def __init__(self, segment: Segment) -> None:
        values = zip(CONTROL_HEADER.offsets, CONTROL_HEADER.packer.unpack_from(segment.buffer), strict=True)
        header: dict[str, int] = {name: value for name, value in values if not isinstance(value, bytes)}
        if header["magic"] != CONTROL_MAGIC or header["abi_digest"] != abi_digest():
            raise LaunchError(f"descriptor {segment.fd} is not a control page of this build; start all from one version")
        if header["total_bytes"] != segment.size_bytes:
            raise LaunchError(f"the control page has {segment.size_bytes} bytes and says {int(header['total_bytes'])}")
        self.world_size = header["world_size"]
        self.submitted_ns = 0  # when this process last rang the doorbell
        self.max_context = header["max_context"]
        self.generation = header["generation"]
        self._segment = segment
        self._words = segment.words()
        self._rank_base = header["rank_offset"] // 8
        self._requests = RequestBlocks(segment, header["request_offset"], header["request_stride"], self.max_context)
        self._doorbell_futex = FutexWord(segment.buffer, 8 * _DOORBELL)
        slots, ring_offset, vocab_size = range(header["parallel"]), header["ring_offset"], header["vocab_size"]
        offsets = [ring_offset + slot * ring_bytes(self.max_context) for slot in slots]
        self.rings = [TokenRing(segment, offset, self.max_context, ring_offset) for offset in offsets]
        offsets = [header["mask_offset"] + slot * (mask_bytes(vocab_size) + FORCED_BYTES) for slot in slots]
        self.mask_slots = [MaskSlots(segment, offset, vocab_size) for offset in offsets]
        self.forced_slots = [ForcedSlot(segment, offset + mask_bytes(vocab_size)) for offset in offsets]
        self.ring, self.masks, self.forced = self.rings[0], self.mask_slots[0], self.forced_slots[0]  # where there is one slot

    @classmethod
    def create(
        cls, world_size: int, max_context: int, generation: int = 1, *, vocab_size: int = 0, parallel: int = 1
    ) -> ControlPage:
        """A new page for `world_size` ranks, whose heartbeats start now. `generation` counts the starts of an engine, from 1.

        Without a `vocab_size` there is no room for masks. `parallel`: requests that may decode together, MOST_PARALLEL at most.
        """
        rank_offset = CONTROL_HEADER.size_bytes
        request_offset = rank_offset + round_up(world_size * RANK_CONTROL.size_bytes)
        request_stride = block_bytes(max_context)
        ring_offset = request_offset + NUM_BLOCKS * request_stride
        mask_offset = ring_offset + parallel * ring_bytes(max_context)
        segment = Segment.create("kog-control", mask_offset + parallel * (mask_bytes(vocab_size) + FORCED_BYTES))
        values: dict[str, int | bytes] = {
            "magic": CONTROL_MAGIC, "abi_digest": abi_digest(), "generation": generation, "world_size": world_size,
            "max_context": max_context, "total_bytes": segment.size_bytes, "rank_offset": rank_offset,
            "request_offset": request_offset, "request_stride": request_stride, "ring_offset": ring_offset,
            "mask_offset": mask_offset, "vocab_size": vocab_size, "parallel": parallel, "cancel": b"", "newest": b"",
        }  # fmt: skip
        CONTROL_HEADER.packer.pack_into(segment.buffer, 0, *(values.get(name, 0) for name in CONTROL_HEADER.offsets))
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
        """Finish what runs and take nothing new. Writers: supervisor, and the coordinator, which a client asks."""
        self._words[_DRAIN] = 1
        self._doorbell_futex.wake()

    def draining(self) -> bool:
        """Whether the engine is to finish and stop."""
        return bool(self._words[_DRAIN])

    # --- coordinator -----------------------------------------------------------------------------------------------------------

    def submit(self, request: DecodeRequest) -> int:
        """Hand a request to the ranks; returns its seq, from 1. Writer: coordinator.

        The block is written completely before the doorbell. Two blocks are used in turn: see `may_submit`. Raises RequestError
        for values that the block cannot hold.
        """
        seq = self._words[_DOORBELL] + 1
        self._requests.write(seq, request)
        if not request.only_copies:
            self._words[_NEWEST + request.decode_slot] = seq
        self.submitted_ns = time.monotonic_ns()
        self._words[_DOORBELL] = seq
        self._doorbell_futex.wake()
        return seq

    def may_submit(self) -> bool:
        """Whether the block of the next request is free: every rank has read the one before the newest."""
        newest = self._words[_DOORBELL]
        return bool(newest < 2 or self.all_read(newest - 1))

    def rouse(self) -> None:
        """A request is likely to come within a millisecond: ranks that heed it wake now, beside what the coordinator still does.

        For others it would take the coordinator's core away. Writer: nobody.
        """
        if self.heeds_rousing():
            self._doorbell_futex.wake()

    def heeds_rousing(self) -> bool:
        """Whether ranks wait with something to do when they are roused, which needs cores of their own."""
        return bool(self._words[self._rank_word(0, _HEEDS_ROUSING)])

    def cancel(self, seq: int, slot: int = 0) -> None:
        """Cancel request `seq` and all before it in this decode slot. Writer: coordinator."""
        self._words[_CANCEL + slot] = max(seq, self._words[_CANCEL + slot])

    def cancelled(self, seq: int, slot: int = 0) -> bool:
        """Whether request `seq` was cancelled. Ranks see it at different times: rank 0 decides and tells the others."""
        return bool(self._words[_CANCEL + slot] >= seq)

    def newest(self, slot: int) -> int:
        """Seq of the newest request of a decode slot, 0 before the first."""
        return int(self._words[_NEWEST + slot])

    # --- ranks -----------------------------------------------------------------------------------------------------------------

    def doorbell(self) -> int:
        """Seq of the newest request, 0 before the first."""
        return int(self._words[_DOORBELL])

    def heed_rousing(self, rank: int) -> None:
        """Say that this rank waits with something to do `when_roused`. Writer: the rank itself."""
        self._words[self._rank_word(rank, _HEEDS_ROUSING)] = 1

    def wait_doorbell(
        self, rank: int, seen: int, deadline: Deadline | None = None, *, when_roused: Callable[[], None] | None = None
    ) -> WaitResult:
        """Block in the kernel until a request newer than `seen` is there (OK), or ABORT, or TIMEOUT; beats meanwhile.

        `when_roused`: to be called when a request is about to come; then looks for it for a moment before blocking again.
        """
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
            is_woken = self._doorbell_futex.wait(doorbell, min(IDLE_POLL_S, deadline.remaining_s()))
            if is_woken and when_roused is not None and self.doorbell() == doorbell and not self.aborted():
                when_roused()
                spin = Deadline.after(ROUSED_SPIN_S)
                wait(lambda: self.doorbell() > seen, aborted=self.aborted, deadline=spin, yields=sys.maxsize)

    def read_request(self, seq: int) -> DecodeRequest:
        """Request `seq`, complete or not at all: ProtocolError when the block is damaged or already holds another request."""
        return self._requests.read(seq)

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

    def set_startup(self, rank: int, report: StartReport) -> None:
        """Say what `rank` does before it is ready. Writer: the rank itself."""
        self._words[self._rank_word(rank, _STARTUP)] = report.pack()

    def startup(self, rank: int) -> StartReport:
        """What `rank` said last of its start."""
        return StartReport.unpack(self._words[self._rank_word(rank, _STARTUP)])

    def set_read(self, rank: int, seq: int) -> None:
        """Say that `rank` has read request `seq` and all before it. Writer: the rank itself."""
        self._words[self._rank_word(rank, _READ)] = seq

    def all_read(self, seq: int) -> bool:
        """Whether every rank has read request `seq`."""
        return all(self._words[self._rank_word(rank, _READ)] >= seq for rank in range(self.world_size))

    def set_kv_layout(self, rank: int, layout: KvLayout) -> None:
        """Say which KV caches `rank` has, before it is ready. Writer: the rank itself."""
        for word, value in zip(_KV_LAYOUT, astuple(layout), strict=True):
            self._words[self._rank_word(rank, word)] = value

    def kv_layout(self) -> KvLayout:
        """The KV caches of rank 0, like those of all ranks; none before it is ready."""
        return KvLayout(*(self._words[self._rank_word(0, word)] for word in _KV_LAYOUT))

    def set_prefill(self, rank: int) -> None:
        """Say that prompts go through prefill on `rank`, before it is ready. Writer: the rank itself."""
        self._words[self._rank_word(rank, _HAS_PREFILL)] = 1

    def has_prefill(self) -> bool:
        """Whether prompts go through prefill, in blocks of many tokens, on all ranks."""
        return all(self._words[self._rank_word(rank, _HAS_PREFILL)] for rank in range(self.world_size))

    def set_progress(self, rank: int, seq: int, num_positions: int, slot: int = 0) -> None:
        """Say how many positions of request `seq`, in this decode slot, the KV cache of `rank` holds. Writer: the rank itself."""
        self._words[self._rank_word(rank, _PROGRESS + slot)] = (seq & 0xFFFFFFFF) << 32 | num_positions

    def progress(self, seq: int, slot: int = 0) -> int | None:
        """Positions of request `seq` that rank 0 holds; None before it has begun, and after a later one of its slot has."""
        word = self._words[self._rank_word(0, _PROGRESS + slot)]
        return word & 0xFFFFFFFF if word >> 32 == seq & 0xFFFFFFFF else None

    def stamp(self, rank: int, stage: RankStage, slot: int = 0, moment_ns: int | None = None) -> None:
        """Say that the request of a decode slot has come to `stage` now, or at that moment. Writer: the rank itself."""
        now_ns = time.monotonic_ns() if moment_ns is None else moment_ns
        self._words[self._rank_word(rank, _STAGES) + slot * len(RankStage) + stage] = now_ns

    def stages_ns(self, rank: int, slot: int = 0) -> list[int]:
        """When the newest request of a decode slot that came to each RankStage did so; 0: none did."""
        first = self._rank_word(rank, _STAGES) + slot * len(RankStage)
        return self._words[first : first + len(RankStage)].tolist()

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
        for ring, masks, forced in zip(self.rings, self.mask_slots, self.forced_slots, strict=True):
            ring.close()
            masks.close()
            forced.close()
        self._doorbell_futex.close()
        self._words.release()
        self._segment.close()
