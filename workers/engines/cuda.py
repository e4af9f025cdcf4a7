"""The engine of a GPU rank: the monokernel decodes in chunks of many tokens; the host hands out what it writes.

With several ranks every one of them reads the request, launches the same numbers of steps and takes the tokens from its own ring;
rank 0 alone writes the token ring, heeds a cancel and reports log-probabilities. Whatever ends an answer is decided alike by all
kernels. How far ranks are apart in time does not matter.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from numpy.typing import NDArray

from kog_dist.decode.plan.validate import check
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest, KvCopyKind, KvUse
from kog_dist.errors import AbortedError, KogError, LaunchError, RequestFailed
from kog_dist.runtime.control import ControlPage, KvLayout, RankState
from kog_dist.runtime.notes import note
from kog_dist.runtime.pace import Pace
from kog_dist.runtime.ring import NO_TOKEN, NOT_DRAFTED, Drafted, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.runtime.wait import Deadline, WaitResult, wait
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda import kv_blocks
from kog_dist.workers.cuda.company_build import company_shape, company_sizes
from kog_dist.workers.cuda.draft_builds import PASS_TOKENS, drafting_shape_of_engine, drafts_processors
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_words import check_words
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines.choice_check import ChoiceCheck
from kog_dist.workers.engines.cuda_device import device_index, kernel_shapes, translated_errors, use_device
from kog_dist.workers.engines.cuda_peers import CudaPeers
from kog_dist.workers.engines.cuda_programs import compile_ahead
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.cuda_start import Prefiller, Start, cause_of, free_memory, refusal
from kog_dist.workers.engines.cuda_states import CudaStates, anew
from kog_dist.workers.engines.cuda_turn import Decision
from kog_dist.workers.engines.draft_gain import DraftGain, gains_from_turns
from kog_dist.workers.engines.heartbeat import Heartbeat
from kog_dist.workers.engines.launches import ANSWER_STEPS, CHUNKS_QUEUED, COMPANY_STEPS, DecodeKernel, Launches, Token
from kog_dist.workers.engines.opening import opened
from kog_dist.workers.engines.prompt_run import PromptRun
from kog_dist.workers.intake import Intake
from kog_dist.workers.prefill.base.delta_blocks import BLOCK
from kog_dist.workers.prefill.prefill import ended
from kog_dist.workers.prefill.tape.tape_abi import is_multiplied_on_tape

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.cuda.kernel_shape import KernelShape

HEARTBEAT_MARGIN_S = 2.5  # a wait that runs out of time says more than silence, so it comes first: after 2.25 s among peers
POLL_S = 20e-6
FIRST_TOKEN_SPIN_S = 0.004  # behind prefill it comes within about a millisecond, and whoever asked waits for it
REFILL_TOKENS = 16
MIN_PREFILL_TOKENS = 3  # fewer are faster one by one: a chunk takes as long as reading the weights
MIN_TAPE_TOKENS, MIN_EXPANDED_TOKENS = 4, 6  # the same of quantised ones (docs/formats.md#prefill)
ALONE_WAIT_US = 500_000  # longest wait on the device
FIRST_MASK_TIMEOUT_S = 5.0
_ENDED = object()
AMONG_PEERS_WAIT_US = 2_000_000  # hosts start their launches at different times; a stopped one is found sooner, by its heartbeat


class CudaEngine:
    """See `Engine`. Hosts its rank's lanes of the model on one GPU."""

    def __init__(self, args: WorkerArgs, control: ControlPage) -> None:
        self._args, self._control, self._rank = args, control, args.info.rank
        self._peers: CudaPeers | None = None  # None: one rank
        self._kernel: DecodeKernel | None = None
        self._blocks: kv_blocks.KvBlocks | None = None
        self._states: CudaStates | None = None  # None: the model has no state that every token changes
        self._prefill: Prefiller | None = None  # None: the kernel takes prompts token by token
        self._min_prefill_tokens = MIN_PREFILL_TOKENS
        self._has_overflown = False  # prefill, in any request so far
        self._has_said_undrafted = False  # that a request has none
        self._pass_tokens = PASS_TOKENS  # of a pass with drafts
        self._drafts_processors = False  # also where a request has processors
        self._pass_extra = 0.0  # what a pass of several tokens takes more than one of a single token, in such passes
        self._choices: ChoiceCheck | None = None  # None: nobody compares which experts are chosen
        self._intake: Intake | None = None  # of the requests that come while some run
        self._cleared = dict[int, int]()  # by KV cache that a fault has emptied: the newest request that may want to copy from it
        self._max_context = 0
        self._start = StartTeller(partial(control.set_startup, self._rank))
        self._heartbeat = Heartbeat(control, self._rank, args.step_timeout_s + HEARTBEAT_MARGIN_S)

    # ---- startup ----
    def startup(self) -> None:
        """See `Engine.startup`. Nothing is allocated or loaded any more once a kernel may wait for a peer."""
        args, world_size = self._args, self._args.info.world_size
        deadline = Deadline.after(args.startup_timeout_s)
        self._control.set_state(self._rank, RankState.LOADING)
        self._start.begin(StartStage.CHECKPOINT)
        checkpoint = opened(args, self._control.max_context)
        spec = checkpoint.spec
        shapes = kernel_shapes(
            checkpoint, args.kv_dtype, world_size, whole_windows=args.whole_windows, checks_experts=args.check_experts
        )
        own = shapes[self._rank]
        of_drafts = [drafting_shape_of_engine(own)] if args.drafts else []
        self._pass_tokens = of_drafts[0].tokens if of_drafts else 1
        for build in (
            *of_drafts,
            *(company_shape(own, size) for size in company_sizes(own, args.parallel)),
        ):
            check_words(build)
        plan = kernel_plan(shapes)
        check(plan)
        with translated_errors(args.device), self._start.hearing_compilers():
            self._start.begin(StartStage.DEVICE)
            use_device(args.device)
            if world_size > 1:
                self._peers = CudaPeers(args, self._control, shapes, deadline)
                self._start.begin(StartStage.PEERS)
                self._peers.agree(checkpoint, plan.digest(), device_index(args.device))
                self._peers.build()
            else:
                compile_ahead(shapes, args)
            self._kernel = self._load(checkpoint, shapes[self._rank])
            if args.check_experts and spec.experts is not None:
                gather = self._peers.gather_choices if self._peers is not None else lambda own: [own]
                self._choices = ChoiceCheck(self._rank, spec.experts.per_token, gather)
            self._make_blocks(shapes[self._rank], self._kernel)
            self._max_context = spec.max_context
            self._try_kernel(self._kernel)

    def _make_blocks(self, shape: KernelShape, kernel: Any) -> None:
        """The pool, if there is memory for one, and the model can have one; said in the control page. And the books of states."""
        num_tokens = kv_blocks.block_tokens(shape)
        slots, states = kv_blocks.pool_slots(shape, self._args.kept_bytes)
        host_slots = self._args.kept_host_bytes // kv_blocks.block_bytes(shape)
        # Drafts that were wrong are in the way of as many of the oldest positions.
        ring_positions = max(shape.cache.ring_positions - (self._pass_tokens - 1 if self._args.drafts else 0), 0)
        layout = KvLayout(self._args.num_kv_caches, ring_positions)
        if shape.delta is not None:
            self._states = CudaStates(self._args.num_kv_caches)
            layout = replace(layout, state_stride=1 if self._prefill is None else BLOCK)
        if slots:
            nets_ptr = 0 if kernel.nets is None else int(kernel.nets.data.ptr)
            self._blocks = kv_blocks.KvBlocks(shape, kernel.kv.data.ptr, slots, host_slots, nets_ptr=nets_ptr, states=states)
            layout = replace(layout, block_tokens=num_tokens, num_slots=slots, num_host_slots=host_slots, num_states=states)
        self._control.set_kv_layout(self._rank, layout)

    def _load(self, checkpoint: Checkpoint, shape: KernelShape) -> DecodeKernel:
        peers = self._peers
        of_codes = MIN_TAPE_TOKENS if is_multiplied_on_tape(shape) else MIN_EXPANDED_TOKENS
        self._drafts_processors = self._args.drafts and drafts_processors(shape)
        self._min_prefill_tokens = MIN_PREFILL_TOKENS if shape.coding is None else of_codes
        kernel, self._prefill = Start(
            self._args,
            shape,
            checkpoint,
            self._control.mask_slots,
            tell=self._start,
            limit_us=ALONE_WAIT_US if peers is None else AMONG_PEERS_WAIT_US,
            link=self._link,
            sums=None if peers is None else peers.prefill_sums,
            forced=self._control.forced_slots if self._drafts_processors else None,
            first_cause=str if peers is None else self._first_cause,
        ).load()
        return kernel

    def _link(self, prefill_tokens: int) -> CudaHeap | None:
        """The memory that all ranks have mapped, with room for prefill in chunks of so many tokens; None for one rank."""
        if self._peers is None:
            return None
        self._control.set_state(self._rank, RankState.LINKING)
        with self._start.during(StartStage.PEERS):
            heap = self._peers.link(device_index(self._args.device), prefill_tokens)
        self._control.set_state(self._rank, RankState.LOADING)
        return heap

    def _first_cause(self, cause: str) -> str:
        """See `CudaPeers.first_cause`. Says meanwhile that it waits, so that the launcher names the rank that others wait for."""
        assert self._peers is not None
        self._control.set_state(self._rank, RankState.LINKING)
        with self._start.during(StartStage.PEERS):
            found = self._peers.first_cause(cause)
        self._control.set_state(self._rank, RankState.LOADING)
        return found

    def _try_kernel(self, kernel: DecodeKernel) -> None:
        """A token on trial: maps everything, and shows that the kernel runs and that its peers answer. Collective."""
        kernel.begin((0,), 1, SamplingParams())  # for which cupy may have to compile
        if self._peers is not None:
            self._control.set_state(self._rank, RankState.LINKING)
            self._start.begin(StartStage.PEERS)
            self._peers.meet()  # all have loaded all, so nobody's first wait is for somebody's weights
        self._start.begin(StartStage.TRIAL)
        if self._prefill is not None:
            self._prefill = self._tried(self._prefill)
            if self._prefill is None:
                free_memory()
        kernel.launch(1)
        self._await_launches("left its trial")
        kernel.finish()
        self._compare_choices()
        entry = kernel.token(0)
        if entry is None:
            raise LaunchError(f"rank {self._rank}: the kernel ended its trial without a token; start the engine again")
        if self._peers is not None:
            self._peers.compare_trials(entry.token_id)
        if self._takes_turns:
            kernel.try_together()
        if self._args.drafts:
            costs = kernel.measure_drafts()
            if self._peers is not None:
                costs = self._peers.share_costs(costs)
            kernel.set_draft_costs(costs)
            self._pass_extra = costs.extra
            size, factor = self._pass_tokens, 1 + costs.extra
            note(f"passes with drafts have {size} tokens, and take {factor:.2f} times as long as those of one")
            if self._prefill is not None:
                self._prefill.forget(0)

    def _tried(self, prefill: Prefiller) -> Prefiller | None:
        """Prefill if it runs; with `auto` None if not, and the kernel's own trial shows whether the GPU is still usable.

        Among several ranks an error here is the end, since the others may be anywhere in theirs; that a value leaves the range
        of its type they all know.
        """
        ids, cause = (0,) * 2, ""
        try:
            steps = prefill.steps(
                ids,
                0,
                should_stop=lambda: False,
                aborted=self._control.aborted,
                on_progress=lambda _: None,
                on_queued=lambda: None,
                pauses=lambda: False,
            )
            reached = ended(steps)
            if self._control.aborted():
                return prefill  # the kernel's own trial ends, too
            if reached < len(ids):
                cause = "a value of two tokens leaves the range of its binary16"
        except Exception as error:
            if isinstance(error, KogError) and not isinstance(error, LaunchError):
                raise
            cause = cause_of(error)
            if self._peers is not None:
                raise refusal(cause) from error
        if cause and self._args.prefill == "on":
            raise refusal(cause)
        if cause:
            note(f"prompts go token by token, since prefill failed on trial: {cause}")
            return None
        prefill.forget(0)
        self._control.set_prefill(self._rank)
        if self._rank == 0:
            note("prompts go through prefill, in chunks of many tokens")
        return prefill

    # ---- requests ----
    def copy_blocks(self, kv: KvUse) -> None:
        """See `Engine.copy_blocks`. They are queued: what comes next is queued behind them."""
        with translated_errors(self._args.device), self._heartbeat:
            self._copy(kv)

    def _copy(self, kv: KvUse) -> None:
        assert self._blocks is not None, "the coordinator knows whether there is a pool"
        if self._states is not None:
            kv = replace(kv, copies=self._states.saved(kv))
        self._blocks.copy(kv, self._loaded.stream.ptr)

    def run(self, seq: int, request: DecodeRequest, intake: Intake | None = None) -> Finish:
        """See `Engine.run`. Requests that come meanwhile take turns with it, where there are slots for several."""
        with translated_errors(self._args.device), self._heartbeat as heartbeat:
            first = self._taken(seq, request)
            running, self._intake = [first], intake
            while running:
                if len(running) > 1 and self._control.aborted():
                    self._leave(f"left requests {', '.join(f'{one.seq}' for one in running)}")
                sharing = self._sharing(running)
                decision = self._decided(running, sharing)
                for _ in range(decision.num_new):
                    assert intake is not None
                    seq, request = intake.take()
                    if request.only_copies:
                        self._copy(request.kv)
                    else:
                        running.append(self._taken(seq, request))
                together = () if decision.have_drafts else sharing
                reader, waiting = self._readers(running)
                turns = [one for one in running if one not in together and one not in waiting]
                num_decoding = sum(not one.reads for one in turns) + bool(together)
                # Who decodes waits for the others and for a part of a prompt.
                num_steps = 1 if reader is not None and num_decoding > 1 else COMPANY_STEPS
                for one in turns:
                    self._turn(one, running, num_steps, decision, heartbeat)
                if reader is not None and reader.reading is None:  # the next chunk is another one's
                    running.remove(reader)
                    running.append(reader)
                if together:  # who has just begun goes on with them, and waits for no other prompt
                    together = [one for one in running if one.shares and one.finish is Finish.NONE]
                    self._share(together, running, num_steps, heartbeat)
                running = [one for one in running if one.finish is Finish.NONE]
            return first.finish

    @property
    def _takes_turns(self) -> bool:
        """Whether several requests run. Choices of experts are of one."""
        return self._args.parallel > 1 and self._choices is None

    @property
    def _num_new(self) -> int:
        """Requests that have come and are not taken yet, where several run."""
        return self._intake.num_new if self._intake is not None and self._takes_turns else 0

    def _shared(self, number: int) -> int:
        """Rank 0's, where several ranks take turns. Collective."""
        return number if self._peers is None or not self._takes_turns else self._peers.share_number(number)

    def _decided(self, running: Sequence[CudaRequest], sharing: Sequence[CudaRequest]) -> Decision:
        """What a turn goes by that ranks might see differently. Collective."""
        may_begin = sum(1 << one.slot for one in running if self._need_not_wait(one))
        own = Decision(self._num_new, self._have_drafts(sharing), may_begin)
        return Decision.unpack(self._shared(own.pack()))

    def _taken(self, seq: int, request: DecodeRequest) -> CudaRequest:
        """A request whose beginning is on its way to its KV cache, as far as it is kept."""
        kv, prefill = request.kv, self._prefill
        is_gone = kv.source != kv.cache and seq <= self._cleared.get(kv.source, 0)  # what it was to copy
        if self._states is not None:
            kv = self._with_state(seq, kv, is_gone=is_gone)
        elif is_gone:
            kv = anew(kv)
        saves = deque(copy for copy in kv.copies if copy.kind is KvCopyKind.SAVE_STATE)
        if fetched := tuple(copy for copy in kv.copies if copy.kind is not KvCopyKind.SAVE_STATE):
            self._fetch(replace(kv, copies=fetched))
        if kv.source != kv.cache and kv.num_cached:
            self._loaded.copy_beginning(kv.source, kv.cache, kv.num_cached)
            if prefill is not None:
                prefill.forget(0, kv.cache)
        while saves and saves[0].place <= kv.num_cached:
            self._copy(replace(kv, copies=(saves.popleft(),)))
        self._control.set_progress(self._rank, seq, kv.num_cached, request.decode_slot)
        # Of a model with a state whoever reads a token decides about bits: that does not hang on what is kept.
        num_kept = kv.num_cached if self._states is None else 0
        reads = prefill is not None and len(request.prompt) - 1 - num_kept >= self._min_prefill_tokens
        if prefill is not None and not reads:
            prefill.forget(kv.num_cached, kv.cache)
        return CudaRequest(seq, request, kv.num_cached, reads, saves)

    def _with_state(self, seq: int, kv: KvUse, *, is_gone: bool) -> KvUse:
        """What it goes on behind, with a state there. The state of its cache stands where the copy of another one is queued."""
        assert self._states is not None
        missed, use = self._states.num_missed, self._states.use(kv, is_gone=is_gone)
        if self._states.num_missed > missed:
            note(f"request {seq} begins anew: the state behind its first {kv.num_cached} tokens is not there any more")
        if self._states.moves_with(use):
            self._loaded.copy_state(use.source, use.cache)
        return use

    def _readers(self, running: Sequence[CudaRequest]) -> tuple[CudaRequest | None, Sequence[CudaRequest]]:
        """Whose prompt is read now, if any, and whose not: where others decode they wait for a part of a chunk of one of them."""
        reading = [one for one in running if one.reads]
        if not reading:
            return None, ()
        reader = next((one for one in reading if one.reading is not None), reading[0])
        is_alone = len(reading) == len(running) and reader.reading is None
        return reader, () if is_alone else [one for one in reading if one is not reader]

    def _turn(
        self, one: CudaRequest, running: Sequence[CudaRequest], num_steps: int, decision: Decision, heartbeat: Heartbeat
    ) -> None:
        """A chunk of its prompt, of which others that decode let it have a part, or so many steps of its answer, of which the
        first has a launch of its own; all of both where no other request can come.
        """
        in_company = len(running) > 1
        one.company_steps = (1 if one.launches is None else num_steps) if in_company else 0
        one.others_decode = any(not other.reads for other in running)
        meets = self._peers is not None and self._takes_turns  # so each turn has what is queued at its beginning

        def holds() -> bool:
            return in_company or meets or self._num_new > 0

        self._loaded.use(one.slot)
        begins = one.launches is None
        if one.reads:
            if one.reading is None:
                if any(other.has_streams or other.reading is not None for other in running):
                    return
                one.reading = self._read(one, heartbeat)
            if next(one.reading, _ENDED) is not _ENDED:
                return
            one.reading = None
            if one.reads:
                return
        if one.launches is None:
            if one.request.mask_epoch and not self._has_first_mask(one, heartbeat, holds, decision if meets else None):
                return
            one.launches = self._begin(one, one.held)
        if not begins:
            one.launches.turn(one.index, one.company_steps)
        elif one.held > one.request.kv.num_cached:
            self._tell(RankStage.PREFILLED, one.slot)
        self._decode(one, heartbeat, holds)

    def _sharing(self, running: Sequence[CudaRequest]) -> Sequence[CudaRequest]:
        """Those that may share passes now: at least two. Drafts need passes of a request's own, so it has none meanwhile."""
        sharing = [one for one in running if one.shares] if len(running) > 1 and self._loaded.most_together() > 1 else []
        for one in running if self._rank == 0 else ():
            if one.shares and not one.is_followed and len(sharing) > 1:
                self._follow(one)
            one.is_followed = one.gain is not None and len(sharing) > 1
        return sharing if len(sharing) > 1 else []

    def _follow(self, one: CudaRequest) -> None:
        """From here on its gain by drafts is to be known, if it may have any."""
        if one.gain is not None:
            one.gain.catch_up(one.answer)
        elif (prediction := self._prediction(one.request)) is not None:
            one.gain = DraftGain(one.request.prompt, prediction, one.answer, self._pass_tokens, self._pass_extra)

    def _have_drafts(self, sharing: Sequence[CudaRequest]) -> bool:
        """Whether all of them have passes of their own in turn, since they have so many right drafts."""
        gains = [one.gain for one in sharing if one.gain is not None]
        return len(gains) == len(sharing) > 1 and gains_from_turns(gains, self._pass_extra)

    def _share(
        self, together: Sequence[CudaRequest], running: Sequence[CudaRequest], num_steps: int, heartbeat: Heartbeat
    ) -> None:
        """Passes with a token of each of these that goes on, so many in a launch, or more where nobody else runs, until one of
        them ends or another request wants its turn; what they give is handed out as it comes. Where they are too many for a pass
        they have one in turn.
        """
        kernel, queued = self._loaded, deque[Any]()
        most = kernel.most_together()
        groups = [[one.slot for one in together[number : number + most]] for number in range(0, len(together), most)]
        num_launches, have_others = 0, len(together) < len(running)
        reads_tokens = not all(one.index for one in together)  # whose prompts go token by token: progress is told behind a launch
        is_long = len(groups) == 1 and not have_others and not reads_tokens

        def is_over() -> bool:
            if have_others or reads_tokens or self._num_new > 0 or self._have_drafts(together):
                return True
            return any(one.finish is not Finish.NONE or one.is_ending for one in together)

        def goes_on() -> bool:
            if num_launches < len(groups):
                return True
            # All ranks queue as many; what rank 0 ends early ends on all of them.
            return not is_over() if self._peers is None else is_long and num_launches < CHUNKS_QUEUED

        while True:
            while queued and queued[0].done:
                queued.popleft()
            while len(queued) < CHUNKS_QUEUED and goes_on():  # so the next passes begin without the host
                kernel.launch_together(groups[num_launches % len(groups)], ANSWER_STEPS if is_long else num_steps)
                queued.append(kernel.stream.record())
                num_launches += 1
            if is_long and is_over():
                kernel.leave_early()
            if self._control.aborted():
                self._leave(f"left requests {', '.join(f'{one.seq}' for one in together)}")
            has_ended = kernel.is_idle()
            for one in together:
                if one.finish is Finish.NONE:
                    self._take_shared(one, heartbeat, has_ended=has_ended)
            if has_ended and num_launches >= len(groups):
                break
            time.sleep(POLL_S)
        kernel.finish()
        heartbeat.progress()
        for one in together:
            if one.index == 0:  # its prompt goes token by token
                kernel.use(one.slot)
                one.told = min(int(kernel.state()["position"]), len(one.request.prompt) - 1)
                self._control.set_progress(self._rank, one.seq, one.told, one.slot)

    def _take_shared(self, one: CudaRequest, heartbeat: Heartbeat, *, has_ended: bool) -> None:
        """Hand out what shared passes have given of a request. `has_ended`: all that were queued had, before this was called."""
        kernel = self._loaded
        kernel.use(one.slot)
        self._heed_cancel(one)
        while one.finish is Finish.NONE and (token := kernel.token(one.index)) is not None:
            one.is_ending = token.finish is not Finish.NONE
            is_whole = token.finish in (Finish.STOP, Finish.LENGTH)  # its cache holds all in front of this token
            if one.is_ending and not has_ended and not is_whole:
                return
            self._take(one, token, is_whole=is_whole)
            heartbeat.progress()

    def _heed_cancel(self, one: CudaRequest) -> None:
        """End it if somebody asked for that; it travels with rank 0's candidate, so after the same token everywhere."""
        if self._rank == 0 and not one.asked_to_cancel and self._control.cancelled(one.seq, one.slot):
            self._loaded.cancel()
            one.asked_to_cancel = True

    def _fetch(self, kv: KvUse) -> None:
        """Queue what the pool has of a prompt."""
        self._copy(kv)
        assert self._blocks is not None
        first = next((copy.place for copy in kv.copies if copy.kind is KvCopyKind.LOAD), None)
        if self._prefill is not None and first is not None:
            self._prefill.forget(first * kv_blocks.block_tokens(self._blocks.shape), kv.cache)

    def _read(self, one: CudaRequest, heartbeat: Heartbeat) -> Generator[None, None, None]:
        """Have prefill read the prompt, or in company a chunk of it, part by part. Once it holds all, the kernel begins with the
        LM head, in launches that are queued right behind prefill if they can be.

        It holds fewer when the request is to end, or when prefill cannot run it (also fewer than there were): the kernel goes on
        from there, and sees why.
        """
        prefill, request, start = self._prefill, one.request, one.held
        assert prefill is not None
        num_prompt = len(request.prompt)

        def begin() -> Launches:
            return self._begin(one, num_prompt)

        prompt = PromptRun(
            self._control, self._rank, self._peers, one.seq, request, heartbeat, begin, takes_turns=self._takes_turns
        )
        end = prefill.next_end(start, num_prompt) if self._takes_turns else None
        if one.saves:
            end = min(one.saves[0].place, num_prompt if end is None else end)
        if self._states is not None:
            self._states.goes(one.cache)
        one.held = yield from prompt.steps(prefill, start, end, lambda: one.others_decode)
        if self._control.aborted():
            self._leave(f"left request {one.seq}")
        if self._states is not None and start < one.held < num_prompt:
            self._save_state(one, one.held)
        if one.held <= start and not prompt.is_stopped and not self._has_overflown:
            self._has_overflown = True  # said once
            note(f"a value of request {one.seq} left the range of prefill's binary16; such prompts go token by token")
        one.reads = end is not None and start < one.held == end < num_prompt
        one.launches = prompt.launches if one.held == num_prompt else None

    def _begin(self, one: CudaRequest, num_cached: int) -> Launches:
        """Set up a request in the kernel and queue its first launches. The KV cache holds `num_cached` positions, or will when
        the launches begin: if it holds all, prefill leaves the last token's streams.
        """
        kernel, request, first, streams = self._loaded, one.request, num_cached, None
        if num_cached == len(request.prompt) and self._prefill is not None:
            first, streams = num_cached - 1, self._prefill.streams
        max_tokens, sampling = self._max_tokens(request), request.sampling
        processed = ProcessedRequest(request.sampling, request.mask_epoch) if request.needs_all_logits else None
        prediction = self._prediction(request)
        kernel.begin(
            request.prompt,
            max_tokens,
            sampling,
            request.end_ids,
            first_position=first,
            processed=processed,
            streams=streams,
            prediction=prediction,
            cache=request.kv.cache,
        )
        if self._choices is not None:
            self._choices.begin(first)
        if self._states is not None:
            self._states.goes(one.cache)
        launches = Launches(
            kernel,
            len(request.prompt) - 1 - first,
            max_tokens,
            one_by_one=request.logit_digests,
            check=None if self._choices is None else self._compare_choices,
            has_drafts=prediction is not None,
            takes_turns=self._takes_turns,
            has_peers=self._peers is not None,
            leaves_early=self._takes_turns and prediction is not None and processed is None,
            company_steps=one.company_steps,
            stops=[save.place - first for save in one.saves],
            at_stop=partial(self._save_state, one),
            first_position=first,
        )
        self._tell(RankStage.LAUNCHED, request.decode_slot)
        return launches

    def _prediction(self, request: DecodeRequest) -> Sequence[int] | None:
        """What the answer may be like, if tokens are drafted; None: each has a pass of its own."""
        if not request.drafts or not self._args.drafts:
            return None
        if not request.logit_digests and (self._drafts_processors or not request.needs_all_logits):
            return request.prediction
        if not self._has_said_undrafted and self._rank == 0:
            processors = "" if self._drafts_processors else "a grammar, penalties, filters, log-probabilities or "
            note(f"requests with {processors}digests decode without drafts on GPUs")
        self._has_said_undrafted = True
        return None

    def _tell(self, stage: RankStage, slot: int) -> None:
        """Stamp a stage from which on the coordinator looks for the first token."""
        self._control.stamp(self._rank, stage, slot)
        if self._rank == 0:
            self._control.rings[slot].announce()

    def _max_tokens(self, request: DecodeRequest) -> int:
        return min(request.max_tokens, self._max_context - len(request.prompt))

    def _decode(self, one: CudaRequest, heartbeat: Heartbeat, holds: Callable[[], bool]) -> None:
        """Hand out tokens, many of which the kernel decodes in a launch and chooses itself, until the answer ends; once it
        `holds`, until all launches that are queued have ended.
        """
        assert one.launches is not None
        if one.pace is None and one.request.mask_epoch and self._rank == 0:
            one.pace = Pace()
        first = one.index
        while one.index < self._max_tokens(one.request):
            token = self._next_token(one, one.launches, heartbeat, holds)
            if token is None:
                if one.index == first:
                    self._loaded.finish()  # says whether a wait ran out of time
                return
            self._take(one, token)
            if one.finish is not Finish.NONE:
                return
        raise RequestFailed("rank_failed", f"the kernel gave {one.index} tokens of request {one.seq} and did not end it")

    def _take(self, one: CudaRequest, token: Token, *, is_whole: bool = False) -> None:
        """Hand the next token out. `is_whole`: of one that ends with it the kernel need not be waited for."""
        seq, request, slot, index = one.seq, one.request, one.slot, one.index
        if self._choices is not None:
            self._await_launches(f"left request {seq}")
            self._compare_choices()
        if index == 0:
            self._control.stamp(self._rank, RankStage.CHOSEN, slot)
        logits = self._logits(seq) if request.logit_digests else None
        wants_logprobs = self._rank == 0 and request.sampling.logprobs is not None and token.token_id != NO_TOKEN
        logprobs = self._logprobs(seq, index) if wants_logprobs else None
        if self._control.aborted():
            self._leave(f"left request {seq}")
        if token.finish is Finish.NONE or is_whole:
            self._control.set_progress(self._rank, seq, len(request.prompt) + index, slot)
        else:
            self._settle(one, token.finish)
        if self._takes_turns and token.finish is Finish.NONE:
            one.answer.append(token.token_id)
            if one.gain is not None and one.is_followed:
                one.gain.took(token.token_id)
        self._put(one, token.token_id, token.finish, logits, logprobs, token.drafted)
        one.index, one.finish = index + 1, token.finish

    def _need_not_wait(self, one: CudaRequest) -> bool:
        """Whether its launches may begin, if it waits for its first mask: the mask is there, or will not come any more."""
        epoch, control = one.request.mask_epoch, self._control
        if not epoch or one.waits_since_s is None:
            return False
        is_there = control.mask_slots[one.slot].get(epoch) is not None or control.cancelled(one.seq, one.slot)
        return is_there or time.monotonic() > one.waits_since_s + self._first_mask_s

    @property
    def _first_mask_s(self) -> float:
        return min(FIRST_MASK_TIMEOUT_S, self._args.step_timeout_s / 2)

    def _has_first_mask(
        self, one: CudaRequest, heartbeat: Heartbeat, holds: Callable[[], bool], decision: Decision | None
    ) -> bool:
        """Whether its launches may begin: the first mask comes once the grammar is compiled, which may take longer than a kernel
        should wait. False: it holds, so that others have their turns meanwhile.

        All ranks look at the same memory, but where they take turns at what rank 0 has seen there (`decision`). If it does not
        come, or the request is cancelled, the kernel says so after the prompt.
        """
        if one.waits_since_s is None:
            one.waits_since_s = time.monotonic()
        if decision is not None:
            if not decision.begins(one.slot):
                time.sleep(POLL_S)
                return False
        else:
            deadline = Deadline.after(max(one.waits_since_s + self._first_mask_s - time.monotonic(), 0.0))
            result = wait(lambda: self._need_not_wait(one) or holds(), aborted=self._control.aborted, deadline=deadline)
            if result is WaitResult.ABORT:
                self._leave(f"left request {one.seq}")
            if holds() and not deadline.expired() and not self._need_not_wait(one):
                time.sleep(POLL_S)
                return False
        one.waits_since_s = None
        heartbeat.progress()
        return True

    # ---- one token ----
    def _next_token(self, one: CudaRequest, launches: Launches, heartbeat: Heartbeat, holds: Callable[[], bool]) -> Token | None:
        """Wait for a token. The kernel bounds every wait of its own, so launches end; if they end without it, they say why.

        None: it holds, and all launches have ended.
        """
        kernel, seq, index, slot, pace = self._loaded, one.seq, one.index, one.slot, one.pace
        num_held = min(one.held, len(one.request.prompt) - 1)  # before the launches, while they are prefilling
        spin_until_s = time.monotonic() + FIRST_TOKEN_SPIN_S if index == 0 else 0.0
        if index % REFILL_TOKENS == REFILL_TOKENS - 1:
            # Also if this host lags behind and finds each token there: the kernel is not to wait for it.
            launches.refill(index, holds=holds())
        while (token := kernel.token(index)) is None:
            if self._control.aborted():
                self._leave(f"left request {seq}")
            self._heed_cancel(one)
            is_held = holds()
            if index > 0 and self._num_new > 0:
                launches.leave_early()
            if launches.refill(index, holds=is_held):
                heartbeat.progress()
                if index == 0:
                    one.told = max(one.told, num_held + launches.num_prompt_steps_ended)  # it knows nothing of company
                    self._control.set_progress(self._rank, seq, one.told, slot)
            elif kernel.is_idle() and launches.all_ended and kernel.token(index) is None:
                kernel.finish()
                raise RequestFailed("rank_failed", f"the kernel ended without token {index} of request {seq}")
            elif is_held and launches.none_under_way and kernel.token(index) is None:
                return None
            if time.monotonic() < spin_until_s or (pace is not None and pace.until_near_s() <= 0):
                os.sched_yield()
            else:
                time.sleep(POLL_S)
        if pace is not None:
            pace.token()
        heartbeat.progress()
        return token

    def _logprobs(self, seq: int, index: int) -> TokenLogprobs:
        """Those of a token that is known; the kernel makes them while it decodes the next one."""
        kernel = self._loaded
        while (found := kernel.logprobs(index)) is None:
            if self._control.aborted():
                self._leave(f"left request {seq}")
            if kernel.is_idle() and kernel.logprobs(index) is None:
                kernel.finish()
                raise RequestFailed("rank_failed", f"the kernel ended without logprobs of token {index} of request {seq}")
            time.sleep(POLL_S)
        return found

    def _put(
        self,
        one: CudaRequest,
        token_id: int,
        finish: Finish,
        digested: NDArray[Any] | None = None,
        logprobs: TokenLogprobs | None = None,
        drafted: Drafted = NOT_DRAFTED,
    ) -> None:
        """Rank 0 hands a token out, with a digest of the logits `digested`."""
        if self._rank != 0:
            return
        digest = None if digested is None else _sha256(digested)
        ring = self._control.rings[one.slot]
        ring.put(one.seq, one.index, token_id, time.monotonic_ns(), digest, finish, logprobs, drafted)

    def _logits(self, seq: int) -> NDArray[Any] | None:
        """The float32 logits (vocab_size,) of the token that was just decoded; None on ranks above 0. Collective."""
        self._await_launches(f"left request {seq}")
        own: NDArray[Any] = self._loaded.logits.get(stream=self._loaded.stream)
        return own if self._peers is None else self._peers.gather_logits(own)

    def _compare_choices(self) -> None:
        """Of experts, if anybody does; all launches have ended. Collective."""
        if self._choices is not None:
            self._choices.compare(self._loaded)

    # ---- ends ----
    def _settle(self, one: CudaRequest, finish: Finish) -> None:
        """Wait until the kernel has left the request; say how many positions the KV cache holds."""
        kernel = self._loaded
        self._await_launches(f"left request {one.seq}")
        kernel.finish()
        if finish is Finish.NUMERICAL_FAULT:
            kernel.recover()
        held = 0 if finish is Finish.NUMERICAL_FAULT else int(kernel.state()["position"])
        if self._states is not None:
            self._save_state(one, held)
            self._states.stands(one.cache, held)
        self._control.set_progress(self._rank, one.seq, held, one.slot)
        if not held:
            self._cleared[one.cache] = self._shared(self._control.doorbell())

    def _save_state(self, one: CudaRequest, position: int | None = None) -> None:
        """Queue the copy of a request's state that is due behind so many positions, before anybody else is told to use it. None:
        where its launches have left it; a request that has ended elsewhere makes no more copies.
        """
        assert self._states is not None
        at = int(self._loaded.state()["position"]) if position is None else position
        if one.saves and one.saves[0].place == at:
            self._states.stands(one.cache, at)
            self._copy(KvUse(one.cache, one.cache, at, (one.saves.popleft(),)))
            self._states.goes(one.cache)
        elif position is None:
            one.saves.clear()

    def _await_launches(self, doing: str) -> None:
        """Wait for all launches, without blocking in the driver. An abort ends them at once, else their own limits do."""
        while not self._loaded.is_idle():
            if self._control.aborted():
                self._leave(doing)
            time.sleep(POLL_S)

    def _leave(self, doing: str) -> NoReturn:
        self._loaded.abort()
        self._loaded.stream.synchronize()  # bounded: the kernel leaves its waits within microseconds of the abort
        raise AbortedError(f"rank {self._rank} {doing} because the engine is being stopped")

    def rouse(self) -> None:
        """See `Engine.rouse`. The first call of the driver after a pause takes 0.2 ms longer."""
        with translated_errors(self._args.device), self._heartbeat:
            self._loaded.rouse()

    @property
    def _loaded(self) -> DecodeKernel:
        assert self._kernel is not None, "startup comes first"
        return self._kernel

    def close(self) -> None:
        """See `Engine.close`. The kernel leaves before memory that it uses is unmapped; bounded also when peers are gone."""
        self._heartbeat.close()
        if self._kernel is not None:
            self._kernel.abort()
            with suppress(Exception):  # a context that has failed has nothing running
                self._kernel.stream.synchronize()
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
        self._prefill = None  # its graphs use the kernel's memory and the peers'
        if self._peers is not None:
            self._peers.close()
        if self._kernel is not None:
            self._kernel.close()
        self._kernel = self._peers = None


def _sha256(logits: Any) -> bytes:
    return hashlib.sha256(logits.astype("<f4").tobytes()).digest()
