"""The monokernel from the host's side: its memory on the GPU, its launches, and the ring that it writes tokens into."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.cuda_abi import PEERS
from kog_dist.collectives.mailbox import place
from kog_dist.collectives.words import WORD_BYTES, pair_tags
from kog_dist.cuda.build import prebuild
from kog_dist.cuda.device_array import DeviceArray, DeviceStream
from kog_dist.cuda.driver import Kernel
from kog_dist.decode.pass_drafts import in_units
from kog_dist.decode.plan.steps import NONE, Phase
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.errors import DeviceError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.abi import NO_PEER, WAIT_RECORD, WaitRecord
from kog_dist.runtime.forced import ForcedSlot
from kog_dist.runtime.masks import MaskSlots
from kog_dist.runtime.places import with_place
from kog_dist.runtime.ring import NO_TOKEN, NOT_DRAFTED, Drafted, Finish
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.build import PROCESSORS_SOURCE, build, program
from kog_dist.workers.cuda.company_build import CompanyBuild, CompanySeat, company_headers
from kog_dist.workers.cuda.device_slot import DeviceSlot
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.draft_builds import MEASURED_POSITION, NOWHERE, DraftBuilds, PassCosts, draft_headers
from kog_dist.workers.cuda.head_start import HeadStart, LastStreams
from kog_dist.workers.cuda.kernel_abi import DECODE_PARAMS, DECODE_STATE, DELTA_PARAMS, DRAFT_PARAMS, StampKind
from kog_dist.workers.cuda.kernel_header import headers
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS, NUM_HASHES, KernelShape
from kog_dist.workers.cuda.kv_blocks import copy_beginning, net_bytes
from kog_dist.workers.cuda.processors import ProcessedRequest, processors_builds
from kog_dist.workers.cuda.shared_memory import SHARED_BYTES

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap

KERNEL_NAME = "kog_decode"
LONGEST_WAIT_US = 2_000_000
_NO_TOKEN_WORD = 0xFFFFFFFF
_NOT_READY = 600  # cudaErrorNotReady
_STRIDE = 7919  # a prime: from token to token, where drafts are measured


@dataclass(frozen=True, slots=True)
class DeviceToken:
    """One entry that the kernel wrote for the host."""

    token_id: int  # NO_TOKEN if the entry only ends the answer
    finish: Finish
    drafted: Drafted = NOT_DRAFTED  # of the pass whose last token this is


class Monokernel:
    """One GPU's kernel with its weights, caches and words. Not thread-safe.

    Requests of `num_slots` decode slots take turns, launch by launch, each in one of `num_caches` KV caches: `use` says whose
    turn it is. One that begins with streams has the next launch. `company`: sizes of the builds by which requests of several
    slots share passes, on one rank.

    With several ranks `heap` holds `shape.words.boxes`, with drafts those of `drafting_shape`, first and in that order.
    `processors`: with the build that has them, which gets the masks of each slot's grammar from `masks`, if any. `drafts`:
    with the builds of requests that have drafts. `forced`: with those of requests that have both, which get what each slot's
    grammar forces from there; None: without. `wait_limit_us` bounds every wait on the device. Raises CompileError or LaunchError
    when the kernel cannot be had.
    """

    def __init__(
        self,
        shape: KernelShape,
        weights: DeviceWeights,
        *,
        rank: int = 0,
        wait_limit_us: int = 500_000,
        heap: CudaHeap | None = None,
        processors: bool = False,
        masks: Sequence[MaskSlots] = (),
        drafts: bool = False,
        forced: Sequence[ForcedSlot] | None = None,
        num_slots: int = 1,
        num_caches: int = 1,
        company: Sequence[int] = (),
    ) -> None:
        import cupy

        self.shape, self.weights, self.rank = shape, weights, rank
        self._limit_us = min(wait_limit_us, LONGEST_WAIT_US)
        if (shape.num_ranks > 1) != (heap is not None):
            raise ValueError("several ranks need the heap with their mailboxes, one rank needs none")
        self._heap = heap
        if processors and shape.tokens > 1:
            raise ValueError("the build with processors has passes of one token")
        self._peers = np.zeros((), PEERS.dtype).tobytes() if heap is None else heap.device_handle().tobytes()
        others = [*(draft_headers(shape) if drafts else ()), *(company_headers(shape, size) for size in company)]
        of_both = draft_headers(shape) if forced is not None else ()
        programs = [program(one) for one in (headers(shape), *others)]
        prebuild([*programs, *(program(one, PROCESSORS_SOURCE) for one in of_both)])
        cubin = build(headers(shape))
        self.build_log = cubin.log
        cupy.zeros(1)  # makes the context, which the module is loaded into
        self._kernel = Kernel(cubin.path, KERNEL_NAME, SHARED_BYTES)
        self._head_start: HeadStart | None = None
        context = shape.spec.max_context
        first, last = shape.head.vocab_rows
        self.stream: DeviceStream = cupy.cuda.Stream(non_blocking=True)
        self._logits = cupy.zeros((shape.tokens, last - first), cupy.float32)
        self._drafts = cupy.zeros(context, cupy.uint32) if shape.tokens > 1 else None
        self.kv = cupy.zeros(num_caches * shape.cache.num_bytes, cupy.uint8)
        # Of delta nets: what is there before a sequence's first token is not read.
        self.nets = None if shape.delta is None else cupy.zeros(num_caches * shape.delta.num_bytes, cupy.uint8)
        self.words = cupy.zeros(shape.words.num_words, cupy.uint64)
        self._record = cupy.zeros(WAIT_RECORD.size_bytes, cupy.uint8)
        self._spare = cupy.zeros(1, cupy.uint32)
        kinds, vectors = len(StampKind), shape.num_products
        self.trace = cupy.zeros((shape.num_ctas, kinds, vectors), cupy.uint64) if shape.traced_step >= 0 else None
        self.hashes = cupy.zeros(NUM_HASHES, cupy.uint64) if shape.keeps_hashes else None  # after token 64 n: at n % NUM_HASHES
        sizes = (CHOICE_POSITIONS, shape.spec.num_layers, shape.num_ctas)
        self._choices = cupy.zeros(sizes, cupy.uint64) if shape.checks_experts else None  # of position p: at p % CHOICE_POSITIONS
        self._forget_epochs()
        both = forced is not None
        self._draft_builds = DraftBuilds(shape, KERNEL_NAME, num_slots, processors=both) if drafts else None
        self._company = [CompanyBuild(shape, KERNEL_NAME, size) for size in sorted(company)]
        self._together: CompanyBuild | None = None  # whose launch was the last one
        self._ran_together = set[int]()  # numbers of builds with company that have run since `finish`
        self._slots = [DeviceSlot(number, context) for number in range(num_slots)]
        self._slot = self._ran = self._slots[0]  # whose turn it is, and whose state has what counts passes
        if processors:  # last, since it maps memory of the host, which whoever tries again after an error could not
            none = [None] * num_slots
            builds = processors_builds(
                shape, KERNEL_NAME, [*masks, *none][:num_slots], [*(forced or ()), *none][:num_slots], self.words.data.ptr
            )
            for slot, of_slot in zip(self._slots, builds, strict=True):
                slot.processors = of_slot
        # The weights were packed, and the arrays above zeroed, on another stream, which this kernel's stream does not wait for.
        cupy.cuda.Device().synchronize()

    def prepare_head_start(self) -> None:
        """Have what requests need that `begin` with streams. Raises CompileError or LaunchError."""
        if self._head_start is None:
            has_processors = self._slot.processors is not None
            self._head_start = HeadStart(self.shape, self._peers, KERNEL_NAME, processors=has_processors)

    # ---- a request ----
    def use(self, slot: int) -> None:
        """Let what follows be of this decode slot's request."""
        self._slot = self._slots[slot]

    def rouse(self) -> None:
        """Let the GPU do next to nothing, so that it wakes, and with it what the driver needs on the host."""
        from cupy.cuda import runtime

        runtime.memsetAsync(self._spare.data.ptr, 0, self._spare.nbytes, self.stream.ptr)

    def begin(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop_ids: Sequence[int] = (),
        *,
        first_position: int = 0,
        processed: ProcessedRequest | None = None,
        streams: LastStreams | None = None,
        prediction: Sequence[int] | None = None,
        cache: int = 0,
    ) -> None:
        """Set up a request; KV cache `cache` must hold `first_position` tokens of the prompt, and the state that goes with it, of
        delta nets, be behind just these. No launch may be under way.

        `processed`: what it asks for besides; its launches are of the build with processors. `prediction`: what the answer may be
        like, for drafts, which are also looked up in the prompt and in the answer; None: the request has no drafts. `streams`:
        those of the prompt's last token, which is at `first_position`, and which the cache holds, too: its step is an LM head
        alone. What makes them and fills the cache need only be queued; if they turn out to be invalid, launches do nothing, and
        the request is to begin anew.
        """
        from cupy.cuda import runtime

        slot, before = self._slot, self._left_by(self._ran)  # has waited for launches: nothing reads staged memory any more
        slot.tag, slot.cache = slot.tag % 0xFFFFFFFE + 1, cache
        slot.sampling, slot.stop_ids = sampling, tuple(stop_ids)
        slot.left, self._ran, self._together = None, slot, None
        slot.begins_at_head, slot.stop_position = streams is not None, NOWHERE
        self._choose_epoch(int(before["epoch"]), begins_at_head=slot.begins_at_head)
        slot.processed = processed
        if processed is not None:
            assert slot.processors is not None, "made without the build with processors"
            slot.processors.begin(processed, sampling, prompt, self.stream)
        slot.has_drafts, slot.has_undrafted = prediction is not None, False
        state, rest = slot.staged_state, np.frombuffer(array("I", prompt[first_position + 1 :]), np.uint32)
        state[0] = np.zeros((), DECODE_STATE.dtype)
        state["token"], state["position"], state["num_prompt"] = prompt[first_position], first_position, len(prompt)
        state["max_tokens"], state["epoch"], state["num_exchanges"] = max_tokens, self._epoch, before["num_exchanges"]
        state["hash"], state["pass_epoch"] = before["hash"], before["pass_epoch"]
        if prediction is not None:
            assert self._draft_builds is not None, "made without drafts"
            self._draft_builds.begin(slot.number, prompt, prediction, max_tokens, first_position, state, self.stream)
            rest = rest if self._company else rest[:0]  # in company it has none
        copies = [(slot.state.data.ptr, state, DECODE_STATE.size_bytes)]
        if len(rest):  # the first token is in the state, and the kernel never looks at what lies before
            slot.staged_prompt[: len(rest)] = rest
            copies.append((slot.prompt.data.ptr + (first_position + 1) * rest.itemsize, slot.staged_prompt, rest.nbytes))
        for to, source, num_bytes in copies:
            runtime.memcpyAsync(to, source.ctypes.data, num_bytes, runtime.memcpyHostToDevice, self.stream.ptr)
        if streams is not None:
            assert self._head_start is not None, "made without head starts"
            assert first_position == len(prompt) - 1
            self._head_start.publish(streams, self.words.data.ptr, slot.state.data.ptr, self.stream.ptr)

    def expect(self, first_position: int, tokens: Sequence[int]) -> None:
        """Draft the answer for passes of several tokens: the token that is expected at each position from `first_position` on.

        What is expected is decoded ahead, and kept where it is what is chosen; else it only takes time. It stands until other
        tokens are expected there. No launch may be under way.
        """
        assert self._drafts is not None, "made for passes of one token"
        self.stream.synchronize()
        self._drafts[first_position : first_position + len(tokens)].set(np.asarray(tokens, np.uint32))

    @property
    def logits(self) -> DeviceArray:
        """float32 of the last token that had logits, this rank's rows. Waits for the launches where a pass has several tokens."""
        logits: DeviceArray = self._logits[0 if self.shape.tokens == 1 else max(int(self.state()["num_kept"]), 1) - 1]
        return logits

    def _forget_epochs(self) -> None:
        self._epoch = self._num_heads_alone = 0  # at the beginning of the request; its steps without layers
        self._whole_epoch = -1  # of the last step that ran its layers

    def _choose_epoch(self, epoch: int, *, begins_at_head: bool) -> None:
        """Set the first epoch of a request: `epoch`, where the one before ended, or an even number more.

        The layers' words carry 16 bits of their epoch. After thousands of requests of one token each, whose only step was an LM
        head, words that are there from the last step that ran its layers might have the tag that layer 0 of the next one gives
        (`layer_tag` in layout.cuh). Such words are of the last layer; of the one before where the last layer's streams go to all
        ranks' mailboxes; or nobody wrote them yet, and 0 is the tag behind the last layer of epoch -1. Words of attention's
        partitions may stand until the first layer without a window waits for them, from that one or from the last one. Epochs
        left out are never waited for by anybody; their number is even, since candidates have two slots in turn.
        """
        if epoch - self._epoch > self._num_heads_alone:
            self._whole_epoch = epoch - 1
        self._epoch, self._num_heads_alone = epoch, int(begins_at_head)
        num_layers = self.shape.spec.num_layers
        left = {num_layers - 2, num_layers - 1, num_layers}  # how many layers before the one that waits words may be from
        if full := self.shape.cache.full_layers:
            left |= {0, full[-1] - full[0], num_layers - full[0]}
        since = self._epoch + self._num_heads_alone - self._whole_epoch
        while any((since * (num_layers + 1) - layer) % 0x10000 == 0 for layer in left):
            self._epoch, since = self._epoch + 2, since + 2

    def launch(self, num_steps: int, stamps: DeviceArray | None = None, *, stop_position: int = NOWHERE) -> None:
        """Queue at most `num_steps` more passes (those of the prompt count); does nothing once the request has ended.

        `stamps`: uint64 array on the GPU for the time in ns at the end of each pass. `stop_position`: with drafts and delta nets,
        behind how many tokens the state is to stand when launches end, if the request comes so far.
        """
        slot = self._slot
        slot.stop_position = stop_position
        if slot.has_drafts and slot.has_undrafted:
            self._resume_drafts(slot)
        slot.left = self._together = None
        slot.goes_on()
        if self._ran is not slot:
            assert not self._ran.begins_at_head, "its head start stands in words of the next pass"
            slot.goes_on_from(self._ran, self.stream)
            self._ran = slot
        stamps_ptr, is_processed = 0 if stamps is None else stamps.data.ptr, slot.processed is not None
        if slot.begins_at_head:
            assert self._head_start is not None
            slot.begins_at_head = False
            self._launch(self._head_start.processors if is_processed else self._head_start.plain, 1, stamps_ptr)
            num_steps, stamps_ptr = num_steps - 1, stamps_ptr and stamps_ptr + 8
        if not num_steps:
            return
        if slot.has_drafts and (builds := self._draft_builds) is not None:
            for kernel in builds.pair(processors=is_processed):
                self._launch(kernel, num_steps, 0)
            return
        self._launch(slot.processors.kernel if is_processed and slot.processors else self._kernel, num_steps, stamps_ptr)

    def most_together(self) -> int:
        """How many requests a pass may have."""
        return self._company[-1].shape.tokens if self._company else 1

    def launch_together(
        self, slots: Sequence[int], num_steps: int, stamps: DeviceArray | None = None, *, least_seats: int = 1
    ) -> None:
        """Queue at most `num_steps` passes, of which each has a token of the requests of all these decode slots that go on.

        They have no processors, and those that begin with streams have had a launch of their own. Nothing is drafted; a launch of
        their own has drafts again. `stamps`: as for `launch`.
        """
        num_seats = max(len(slots), least_seats)
        number, build = next((i, build) for i, build in enumerate(self._company) if build.shape.tokens >= num_seats)
        self._ran_together.add(number)
        self._slot = self._slots[slots[0]]  # whose limit of waits and whose abort it goes by
        seats = list[CompanySeat | None]()
        for slot in (self._slots[number] for number in slots):
            assert slot.processed is None, "a request with processors shares no pass"
            assert not slot.begins_at_head, "its first launch is its own"
            slot.left, slot.has_undrafted = None, slot.has_drafts
            slot.goes_on()
            pointers = slot.state.data.ptr, slot.prompt.data.ptr, slot.ring.ctypes.data, slot.host.ctypes.data
            own = slot.sampling, slot.stop_ids, slot.tag
            seats.append(CompanySeat(*pointers, self._kv_ptr(slot), *own, nets_ptr=self._nets_ptr(slot)))
        self._together = build
        params = self._params(num_steps)
        params["stamps_ptr"] = 0 if stamps is None else stamps.data.ptr
        raw = build.params(params, self._peers, seats, self._nets_params())
        build.kernel.launch(build.shape.num_ctas, build.shape.num_threads, raw, self.stream.ptr)

    def try_together(self) -> None:
        """A pass of each build for several requests, with one in it. No request is under way. Raises DeviceError, and LaunchError
        if one gives no token.
        """
        for together in self._company:
            self.begin((0,), 1, SamplingParams())
            self.launch_together([self._slot.number], 1, least_seats=together.shape.tokens)
            self.finish()
            if self.token(0) is None:
                num = together.shape.tokens
                raise LaunchError(f"the kernel for {num} requests ended its trial without a token; use --parallel 1")

    def _resume_drafts(self, slot: DeviceSlot) -> None:
        """Tell the drafts of a request what company has decoded. Waits for launches."""
        from cupy.cuda import runtime

        assert self._draft_builds is not None, "made without drafts"
        slot.has_undrafted, slot.staged_state[0] = False, self._left_by(slot)
        state = slot.staged_state[0]
        num_prompt, position = int(state["num_prompt"]), int(state["position"])
        if int(state["finish"]) != Finish.NONE or position < num_prompt:  # of the answer they have missed nothing
            return
        first = max(int(state["draft_looked"]) + 1, num_prompt)
        answer = [slot.ring_words[2 * (at - num_prompt)] & 0xFFFFFFFF for at in range(first, position + 1)]
        self._draft_builds.resume(slot.number, first, answer, position, state, self.stream)
        source = slot.staged_state.ctypes.data
        runtime.memcpyAsync(slot.state.data.ptr, source, DECODE_STATE.size_bytes, runtime.memcpyHostToDevice, self.stream.ptr)

    def _launch(self, kernel: Kernel | None, num_steps: int, stamps_ptr: int, *, fixed_ptr: int = 0) -> None:
        """Queue passes of a build. `fixed_ptr`: see `drafts_ptr` of DECODE_PARAMS."""
        assert kernel is not None, "made without the build with processors"
        params, builds, slot = self._params(num_steps), self._draft_builds, self._slot
        params["stamps_ptr"] = stamps_ptr
        if builds is not None and slot.has_drafts:
            params["prompt_ptr"], params["drafts_ptr"] = builds.prompt_ptr(slot.number), fixed_ptr
            if builds.is_large(kernel):
                params["words_ptr"], params["logits_ptr"] = builds.words.data.ptr, builds.logits.data.ptr
        raw = params.tobytes() + self._peers
        is_of_drafts = builds is not None and builds.is_of(kernel)
        if slot.processors is not None and slot.processed is not None:
            raw += slot.processors.params()
        if builds is not None and is_of_drafts:
            raw += builds.params(slot.number)
            if slot.processors is not None and slot.processed is not None:
                raw += slot.processors.forced_params(in_units(builds.costs.mask_wait))
        elif self.shape.tokens > 1:
            raw += bytes(DRAFT_PARAMS.size_bytes)  # tokens are expected, not looked up
        raw += self._nets_params()
        kernel.launch(self.shape.num_ctas, self.shape.num_threads, raw, self.stream.ptr)

    def measure_drafts(self) -> PassCosts:
        """Find out what passes of several tokens cost. No request may be under way. Collective.

        With experts a pass costs by how many its tokens choose: here all tokens are different, and so are most of their choices.
        Where the context is too short for that, or the passes end early, what is assumed stands.
        """
        assert self._draft_builds is not None, "made without drafts"
        room, assumed = self.shape.spec.max_context, self._draft_builds.costs
        if room < 2 * MEASURED_POSITION:
            return assumed
        different = np.arange(room, dtype=np.uint32) * _STRIDE % self.shape.spec.vocab_size
        prompt = different[: MEASURED_POSITION + 1].tolist()
        self.begin(prompt, room, SamplingParams(), first_position=MEASURED_POSITION, prediction=())
        self._slot.prompt.set(different.astype(np.uint32), stream=self.stream)
        fixed_ptr = self._slot.prompt.data.ptr  # passes with these do not take turns
        measured = self._draft_builds.measure(
            lambda kernel, passes: self._launch(kernel, passes, 0, fixed_ptr=fixed_ptr), self.stream
        )
        self.finish()
        return assumed if int(self.state()["finish"]) else measured

    def set_draft_costs(self, costs: PassCosts) -> None:
        """Let requests from now on go by these costs: the same on all ranks, which decide by them how many tokens passes have."""
        assert self._draft_builds is not None, "made without drafts"
        self._draft_builds.costs = costs

    def _kv_ptr(self, slot: DeviceSlot) -> int:
        """The KV cache of the slot's request."""
        return int(self.kv.data.ptr) + slot.cache * self.shape.cache.num_bytes

    def _nets_ptr(self, slot: DeviceSlot) -> int:
        """What delta nets keep of the slot's request, which goes with its KV cache; 0 in a model without."""
        return 0 if self.nets is None else int(self.nets.data.ptr) + slot.cache * net_bytes(self.shape)

    def _params(self, num_steps: int) -> NDArray[np.void]:
        weights, slot = self.weights, self._slot
        params = np.zeros((), DECODE_PARAMS.dtype)
        arrays = {
            "tape": weights.tape,
            "embedding": weights.embedding,
            "norms": weights.norms,
            "final_norm": weights.final_norm,
            "rope": weights.rope,
            "words": self.words,
            "logits": self._logits,
            "prompt": slot.prompt,
            "state": slot.state,
            "record": self._record,
        }
        optional = {name: getattr(weights, name) for name in ("qkv_bias", "head_norms", "out_bias", "sinks")}
        if weights.experts is not None:
            biases = ("router_bias", "gate_up_bias", "down_bias")
            optional |= {"experts": weights.experts.matrices} | {name: getattr(weights.experts, name) for name in biases}
        optional["drafts"] = self._drafts
        arrays |= {name: held for name, held in optional.items() if held is not None}
        for name, held in arrays.items():
            params[f"{name}_ptr"] = held.data.ptr
        params["kv_ptr"] = self._kv_ptr(slot)
        params["host_ptr"], params["ring_ptr"] = slot.host.ctypes.data, slot.ring.ctypes.data
        kept = [held for held in (self.trace, self.hashes, self._choices) if held is not None]  # at most one: see KernelShape
        params["trace_ptr"] = kept[0].data.ptr if kept else 0
        masked = slot.processed is not None and slot.processed.mask_epoch
        params["seed"], params["wait_limit_us"] = slot.sampling.seed, LONGEST_WAIT_US if masked else self._limit_us
        if slot.sampling.temperature > 0:
            inverse = np.float32(1.0) / np.float32(slot.sampling.temperature)
            params["inverse_temperature_bits"] = inverse.view(np.uint32)
        params["vocab_first"] = self.shape.head.vocab_rows[0]
        params["num_steps"], params["request_tag"] = num_steps, slot.tag
        params["num_stop_ids"] = len(slot.stop_ids)
        params["stop_ids"][: len(slot.stop_ids)] = slot.stop_ids
        return params

    def _nets_params(self) -> bytes:
        """`DELTA_PARAMS` of the slot's request, whose state goes with its KV cache; nothing in a model without delta nets."""
        if self.nets is None:
            return b""
        params = np.zeros((), DELTA_PARAMS.dtype)
        for name in ("taps", "factors", "norm"):
            params[f"{name}_ptr"] = getattr(self.weights, f"delta_{name}").data.ptr
        params["state_ptr"] = self._nets_ptr(self._slot)
        params["stop_position"] = self._slot.stop_position
        return params.tobytes()

    def token(self, index: int) -> DeviceToken | None:
        """Token `index` of the answer, or None when the kernel has not written it yet. Never waits."""
        slot = self._slot
        words = slot.ring_words[2 * index], slot.ring_words[2 * index + 1]  # what is checked is what is used
        if words[0] >> 32 != slot.tag or words[1] >> 32 != slot.tag:
            return None
        token_id, ending = words[0] & 0xFFFFFFFF, words[1] & 0xFFFFFFFF
        drafted = Drafted(ending >> 8 & 0xFF, ending >> 16 & 0xFF, bool(ending >> 24)) if ending > 0xFF else NOT_DRAFTED
        return DeviceToken(NO_TOKEN if token_id == _NO_TOKEN_WORD else token_id, Finish(ending & 0xFF), drafted)

    def logprobs(self, index: int) -> TokenLogprobs | None:
        """Those of token `index`, if the request wants them; None when the kernel has not written them yet. Only on rank 0."""
        assert self._slot.processors is not None, "made without the build with processors"
        return self._slot.processors.logprobs(index, self._slot.tag)

    def choices(self, first: int, end: int) -> NDArray[np.uint64]:
        """Which experts were chosen at positions [first, end), the newest ones: uint64 (positions, layers, thread blocks).

        Their numbers in ascending order, 8 bits each, the first one lowest. Waits for the launches.
        """
        assert self._choices is not None, "made without choices of experts"
        assert end - first <= CHOICE_POSITIONS, "older ones are overwritten"
        newest: NDArray[np.uint64] = self._choices.get(stream=self.stream)
        return newest[np.arange(first, end) % CHOICE_POSITIONS]

    def copy_beginning(self, source: int, cache: int, num_positions: int) -> None:
        """Queue that a KV cache gets the first positions of another one."""
        copy_beginning(self.shape, self.kv.data.ptr, source, cache, num_positions, self.stream.ptr)

    def copy_state(self, source: int, cache: int) -> None:
        """Queue that a KV cache gets the state of another one, of delta nets."""
        from cupy.cuda import runtime

        assert self.nets is not None, "the model has no state"
        num_bytes = net_bytes(self.shape)
        to, start = (int(self.nets.data.ptr) + one * num_bytes for one in (cache, source))
        runtime.memcpyAsync(to, start, num_bytes, runtime.memcpyDeviceToDevice, self.stream.ptr)

    def cancel(self) -> None:
        """End the request after the token that is being decoded."""
        self._slot.host["cancelled_tag"] = self._slot.tag

    def leave_early(self) -> None:
        """Let the launches that are queued, if they have drafts or are of several requests, end behind a pass each, the one under
        way behind that which runs. What is launched later has all of its passes.
        """
        for slot in self._slots:
            slot.leave_early()

    def abort(self) -> None:
        """Make the kernel leave all waits and end; it cannot be used after that until `recover`."""
        for slot in self._slots:
            slot.host["abort"] = 1

    def is_idle(self) -> bool:
        """Whether all launches have ended. Raises what cupy raises when one has failed: its events are never `done` then."""
        import cupy

        code = int(cupy.cuda.runtime.streamQuery(self.stream.ptr))
        if code not in (0, _NOT_READY):
            self.stream.synchronize()
        return code == 0

    # ---- afterwards ----
    def finish(self) -> None:
        """Wait for all launches. Raises DeviceError if a wait of the kernel ran out of time."""
        self.stream.synchronize()
        ran = [self._company[number] for number in sorted(self._ran_together)]
        self._ran_together.clear()
        if self._together is None:
            self._check_left(self.state(), None)
        for together in ran:
            self._check_left(together.state(self.stream), together)

    def _check_left(self, left: np.void, together: CompanyBuild | None) -> None:
        if int(left["abort_mirror"]):
            record = WaitRecord.unpack(self._record.get().tobytes())
            if record.elapsed_ns:
                self._together = together
                raise DeviceError(self._with_peer(replace(record, rank=self.rank)))

    def _with_peer(self, record: WaitRecord) -> WaitRecord:
        """With the rank whose words a wait missed, or NO_PEER, and what it was for. Waits for peers have written that rank and
        the mailbox; those of the matrix warps have a phase instead.

        Of these the LM head's input may come from peers. The record has its lane, with `replicate` the first of those that were
        asked for together; if that one's words were there, it is looked up whose others are not. Where ranks send their sums to
        all who gather a stream, it has the rank instead.
        """
        shape = self._running_shape
        if record.phase == NONE and shape.num_ranks > 1:  # matrix warps that noted nothing have no phase either
            if not record.num_missing:
                return replace(record, peer=self.rank)
            return with_place(shape.spec, replace(record, label=shape.words.boxes.label_of(record.mailbox)))
        if shape.sends_sums_directly and record.phase in (Phase.QKV, Phase.GATE_UP, Phase.HEAD):
            return replace(record, peer=record.lane if record.num_missing else NO_PEER, lane=NONE)
        if record.phase != Phase.HEAD or not self.shape.gathers_streams:
            return replace(record, peer=self.rank)
        if not record.num_missing:
            record = self._with_missing_stream(record)
        return replace(record, peer=record.lane // self.shape.num_lanes if record.num_missing else NO_PEER)

    @property
    def _running_shape(self) -> KernelShape:
        """What the build was compiled for that ran in the last launch. It must have left."""
        if self._together is not None:
            return self._together.shape
        builds = self._draft_builds
        is_large = builds is not None and self._slot.has_drafts and int(self.state()["pass_tokens"]) > 1
        return builds.large_shape if builds is not None and is_large else self.shape

    def _with_missing_stream(self, record: WaitRecord) -> WaitRecord:
        """With the first of the last streams that have not come; unchanged if all have by now. The kernel must have left."""
        from cupy.cuda import runtime

        assert self._heap is not None
        boxes, num_pairs = self.shape.words.boxes, self.shape.spec.hidden_size // 2
        box = next(box for box in place(boxes.specs(), self.shape.num_ranks) if box.spec.name == "streams")
        words = np.zeros(box.num_words, np.uint64)
        source = self._heap.peer_ptr(self.rank, WORD_BYTES * box.first_word)
        runtime.memcpy(words.ctypes.data, source, words.nbytes, runtime.memcpyDeviceToHost)
        copies = words.reshape(-1, boxes.replicas, boxes.stream_copy_words)  # of every lane of the model
        seen = pair_tags(copies[:, record.cta % boxes.replicas, :num_pairs])
        missing = seen != record.epoch_wanted
        lanes = np.flatnonzero(missing.any(axis=1))
        if not len(lanes):
            return record
        lane = int(lanes[0])
        tag = int(seen[lane][missing[lane]][0])
        return replace(record, lane=lane, num_missing=int(missing[lane].sum()), epoch_seen=tag)

    def recover(self) -> None:
        """Make the kernel usable again after a numerical fault or, on one rank, an abort or a DeviceError: forget all state.

        Among several ranks all must call it, after the same token. Only the request's KV cache and state are forgotten there, and
        where there are several: words that peers have left stay, and epochs go on, so that none is ever taken for a later one.
        LaunchError after an abort: ranks may stand at different tokens, and requests of other slots.
        """
        import cupy

        self.stream.synchronize()
        slot = self._slot
        slot.left = None
        if self.shape.num_ranks > 1 or len(self._slots) > 1:
            if slot.host["abort"] or int(self.state()["abort_mirror"]):
                raise LaunchError("a rank among others cannot go on after an abort; start all ranks anew")
            for held, num_bytes in ((self.kv, self.shape.cache.num_bytes), (self.nets, net_bytes(self.shape))):
                if held is not None:
                    held[slot.cache * num_bytes : (slot.cache + 1) * num_bytes].fill(0)
        else:
            slot.host["abort"] = 0
            slot.host["cancelled_tag"] = 0
            of_drafts = () if self._draft_builds is None else (self._draft_builds.words,)
            of_nets = () if self.nets is None else (self.nets,)
            for held in (self.kv, *of_nets, self.words, slot.state, self._record, *of_drafts):
                held.fill(0)
            self._forget_epochs()
        cupy.cuda.Device().synchronize()  # they were filled on another stream than the kernel's

    def state(self) -> np.void:
        """What the request's last launch left, as a `DECODE_STATE` record. Waits for it; a second look costs nothing."""
        return self._left_by(self._slot)

    def _left_by(self, slot: DeviceSlot) -> np.void:
        if slot.left is None:
            slot.left = np.frombuffer(slot.state.get(stream=self.stream).tobytes(), DECODE_STATE.dtype)[0]
        return slot.left

    def close(self) -> None:
        """Let go of memory that is not this kernel's; it must have left."""
        for slot in self._slots:
            if slot.processors is not None:
                slot.processors.close()

    # ---- whole answers ----
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        stop_ids: Sequence[int] = (),
        *,
        chunk: int = 64,
        processed: ProcessedRequest | None = None,
    ) -> list[int]:
        """Decode an answer to its end; launches of `chunk` steps, two of them queued at a time."""
        self.begin(prompt, max_tokens, sampling or SamplingParams(), stop_ids, processed=processed)
        for _ in range(0, len(prompt) + max_tokens, chunk):
            self.launch(chunk)
        self.finish()
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            entry = self.token(len(tokens))
            assert entry is not None, f"the kernel ended without writing token {len(tokens)}"
            if entry.token_id != NO_TOKEN:
                tokens.append(entry.token_id)
            if entry.finish is not Finish.NONE:
                break
        return tokens
