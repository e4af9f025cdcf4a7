"""The engine of a CPU rank: the plan's interpreter in NumPy, peers through shared memory."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cpu import CpuCommunicator
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter, StepOutput
from kog_dist.decode.cpu.passes import most_tokens, most_verified, pass_mailboxes, pass_sizes
from kog_dist.decode.cpu.pool_sizes import BLOCK_TOKENS, pool_slots
from kog_dist.decode.draft_lengths import SIZES
from kog_dist.decode.drafts import NO_DRAFT, Drafter, LookupDrafter
from kog_dist.decode.places import with_place
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest, KvCopy, KvCopyKind, KvUse
from kog_dist.decode.ring import NO_TOKEN, NOT_DRAFTED, Drafted, Finish
from kog_dist.errors import AbortedError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.control import ControlPage, EpochWaits, KvLayout, RankState
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines import forced_drafts
from kog_dist.workers.engines.agreement import agree, common_terms
from kog_dist.workers.engines.cpu_blocks import CpuBlocks
from kog_dist.workers.engines.forced_drafts import ForcedDrafts
from kog_dist.workers.engines.heartbeat import Heartbeat
from kog_dist.workers.engines.opening import opened
from kog_dist.workers.engines.pass_costs import pass_costs
from kog_dist.workers.engines.root_choice import RootChoice

HEARTBEAT_MARGIN_S = 2.0  # a wait that runs out of time says more than silence, so it comes first


class CpuEngine:
    """See `Engine`."""

    def __init__(self, args: WorkerArgs, control: ControlPage) -> None:
        self._args, self._control = args, control
        self._rank, self._world_size = args.info.rank, args.info.world_size
        self._rendezvous: LocalRendezvous | None = None
        self._comm: CpuCommunicator | None = None
        self._interpreter: Interpreter | None = None
        self._pass_tokens = 1  # of a prompt, at most
        self._costs = [1.0] * len(SIZES)  # of passes that choose
        self._blocks: CpuBlocks | None = None
        self._start = StartTeller(partial(control.set_startup, self._rank))
        self._heartbeat = Heartbeat(control, self._rank, args.step_timeout_s + HEARTBEAT_MARGIN_S)

    # ---- startup ----
    def startup(self) -> None:
        """See `Engine.startup`."""
        args, rank = self._args, self._rank
        deadline = Deadline.after(args.startup_timeout_s)
        self._control.set_state(rank, RankState.LOADING)
        self._start.begin(StartStage.CHECKPOINT)
        checkpoint = opened(args, self._control.max_context)
        spec = checkpoint.spec
        with self._start.hearing_compilers():
            products = host_library.library()
        lanes = spec.lanes_of_rank(rank, self._world_size)
        self._start.begin(StartStage.WEIGHTS)
        weights = checkpoint.rank_weights(lanes, keeps_halves=products is not None, on_share=self._start.share)
        plan = make_plan(spec, self._world_size, checks_experts=args.check_experts)
        plan = replace(plan, num_tokens=1 if products is None else most_verified(plan))
        if rank == 0:
            check(plan)  # the others have the same plan, or do not agree with it
        self._control.set_state(rank, RankState.LINKING)
        self._start.begin(StartStage.PEERS)
        aborted = self._control.aborted
        self._rendezvous = LocalRendezvous.from_fd(args.info.rendezvous_fd, rank, aborted=aborted)
        self._pass_tokens = 1 if products is None else most_tokens(plan)
        terms = common_terms(args, checkpoint, plan.digest()) | {
            "numpy": np.__version__,
            "products": products.name if products else "",
        }
        agree(self._rendezvous, terms, deadline)
        by_token = pass_mailboxes(plan)
        self._comm = CpuCommunicator.create(
            [
                MailboxSpec(
                    box.name, box.num_slots, box.length, max(plan.num_tokens, self._pass_tokens if box.name in by_token else 1)
                )
                for box in plan.mailboxes
            ]
            + ([forced_drafts.MAILBOX] if plan.num_tokens > 1 else []),
            rendezvous=self._rendezvous,
            control=self._control,
            deadline=deadline,
            timeout_s=args.step_timeout_s,
        )
        self._comm.explain = partial(with_place, spec)
        self._interpreter = Interpreter(
            plan, rank, weights, self._comm, kv_dtype=args.kv_dtype, num_kv_caches=args.num_kv_caches, is_checked=True
        )
        self._control.set_kv_layout(rank, self._kv_layout(spec, len(lanes)))
        self._start.begin(StartStage.TRIAL)
        begin_s = time.perf_counter()
        self._interpreter.step(0, 0, SamplingParams())  # maps pages, fills caches, and shows that all ranks answer
        self._costs = pass_costs(self._interpreter, time.perf_counter() - begin_s, self._rendezvous, deadline)
        self._comm.waits = EpochWaits()  # only those of requests count
        self._control.set_epoch_waits(rank, self._comm.waits)
        self._rendezvous.barrier(deadline)

    def _kv_layout(self, spec: ModelSpec, num_lanes: int) -> KvLayout:
        """The caches, and a block pool where the memory that it may take has room for a block."""
        assert self._interpreter is not None
        memory = self._interpreter.memory
        slots, states = pool_slots(spec, num_lanes, memory.dtype.itemsize, self._args.kept_bytes)
        layout = KvLayout(self._args.num_kv_caches)
        if not slots:
            return layout
        self._blocks = CpuBlocks(memory, slots, states)
        return replace(layout, block_tokens=BLOCK_TOKENS, num_slots=slots, num_states=states)

    # ---- requests ----
    def run(self, seq: int, request: DecodeRequest) -> Finish:
        """See `Engine.run`."""
        with self._heartbeat:
            assert self._interpreter is not None
            use, kinds = request.kv, KvCopyKind
            if blocks := tuple(copy for copy in use.copies if copy.kind is kinds.LOAD):
                self.copy_blocks(replace(use, copies=blocks))
                self._interpreter.filled(use.source, use.num_cached)
            states = tuple(copy for copy in use.copies if copy.kind is kinds.LOAD_STATE)
            load = partial(self.copy_blocks, replace(use, copies=states)) if states else None
            self._interpreter.use_cache(use.cache, use.source, use.num_cached, load)
            self._control.set_progress(self._rank, seq, use.num_cached)
            if not self._prefill(seq, request):
                self._put(seq, 0, NO_TOKEN, None, None, Finish.CANCELLED)
                return Finish.CANCELLED
            self._control.stamp(self._rank, RankStage.PREFILLED)
            return self._decode(seq, request)

    def copy_blocks(self, kv: KvUse) -> None:
        """See `Engine.copy_blocks`."""
        assert self._blocks is not None, "the coordinator knows whether there is a pool"
        self._blocks.copy(kv)

    def _prefill(self, seq: int, request: DecodeRequest) -> bool:
        """Fill the KV cache with the prompt up to its last token; False when the request was cancelled meanwhile."""
        position, end = request.kv.num_cached, len(request.prompt) - 1
        saves = deque(copy for copy in _state_saves(request.kv) if copy.place <= end)
        for stop in sorted({*(copy.place for copy in saves), end}):
            for size in pass_sizes(stop - position, self._pass_tokens):
                is_stopped = self._read(seq, request.prompt[position : position + size], position).stopped
                position += size
                if is_stopped:
                    self._save_states(request.kv, saves, position)
                    return False
            self._save_states(request.kv, saves, position)
        return True

    def _save_states(self, kv: KvUse, saves: deque[KvCopy], num_positions: int) -> None:
        """Make those copies of the state that are due: the request has come so far."""
        assert self._interpreter is not None
        while saves and saves[0].place <= num_positions:
            self._interpreter.settle(saves[0].place)
            self.copy_blocks(replace(kv, copies=(saves.popleft(),)))

    def _decode(self, seq: int, request: DecodeRequest) -> Finish:
        """Pass by pass: the newest token, and drafts of those behind it."""
        root, drafter = self._root_choice(seq, request), self._drafter(request)
        forced = None if drafter is None or not request.mask_epoch else self._forced(request)
        token_id, index, position = request.prompt[-1], 0, len(request.prompt) - 1
        saves = deque(copy for copy in _state_saves(request.kv) if copy.place > position)
        while True:
            most = min(request.max_tokens - index, self._spec.max_context - 1 - position, self._most_verified) - 1
            draft = NO_DRAFT if drafter is None else drafter.draft(most, () if forced is None else forced.next(index))
            told: list[int] = []  # tokens of this pass that are in the ring already
            if root is not None:
                root.begin_pass(position, partial(self._tell, seq, request, root, index, position, told))
            outputs = self._verify(seq, request, (token_id, *draft.token_ids), position, root)
            if index == 0:
                self._control.stamp(self._rank, RankStage.CHOSEN)
            ends = [self._finish(request, root, output, index + idx, position + idx) for idx, output in enumerate(outputs)]
            num = next((idx + 1 for idx, finish in enumerate(ends) if finish is not Finish.NONE), len(ends))
            self._save_states(request.kv, saves, position + num)
            self._end(seq, position + num)
            drafted = Drafted(len(draft.token_ids), len(outputs) - 1, draft.is_predicted)
            for idx in range(len(told), num):
                self._hand_out(
                    seq, request, root, outputs[idx], index + idx, ends[idx], NOT_DRAFTED if idx + 1 < num else drafted
                )
            if ends[num - 1] is not Finish.NONE:
                assert self._interpreter is not None
                self._interpreter.go_back(position + num)  # the pass may have gone beyond the end
                return ends[num - 1]
            if drafter is not None:
                drafter.took([output.token_id for output in outputs])
            token_id, index, position = outputs[-1].token_id, index + num, position + num

    def _drafter(self, request: DecodeRequest) -> Drafter | None:
        """None: each token has a pass of its own."""
        if not request.drafts or self._most_verified == 1:
            return None
        return LookupDrafter(request.prompt, request.prediction, self._costs)

    def _forced(self, request: DecodeRequest) -> ForcedDrafts:
        assert self._interpreter is not None
        comm = self._comm if self._interpreter.plan.world_size > 1 else None
        return ForcedDrafts(request, self._control, comm, self._rank)

    def _tell(
        self, seq: int, request: DecodeRequest, root: RootChoice, index: int, position: int, told: list[int], idx: int,
        token_id: int, logits: NDArray[Any],
    ) -> bool:  # fmt: skip
        """Put a token of the pass into the ring while the pass runs, for the grammar process; false: the answer ends with it."""
        output = StepOutput(token_id, logits, True, False)
        if self._finish(request, root, output, index + idx, position + idx) is not Finish.NONE:
            return False
        self._hand_out(seq, request, root, output, index + idx, Finish.NONE, NOT_DRAFTED)
        told.append(token_id)
        return True

    def _finish(self, request: DecodeRequest, root: RootChoice | None, output: StepOutput, index: int, position: int) -> Finish:
        """Whether the answer ends with token `index`, chosen behind the one at `position`."""
        if output.stopped:  # why rank 0 found nothing to choose, it alone knows
            return root.failure if root is not None and root.failure is not Finish.NONE else Finish.CANCELLED
        if not output.finite:
            return Finish.NUMERICAL_FAULT
        if output.token_id in request.end_ids:
            return Finish.STOP
        is_full = index + 1 >= request.max_tokens or position + 2 >= self._spec.max_context
        return Finish.LENGTH if is_full else Finish.NONE

    def _hand_out(
        self,
        seq: int,
        request: DecodeRequest,
        root: RootChoice | None,
        output: StepOutput,
        index: int,
        finish: Finish,
        drafted: Drafted,
    ) -> None:
        """Rank 0 puts a token of the answer into the ring, or that there is none."""
        if finish in (Finish.CANCELLED, Finish.NUMERICAL_FAULT, Finish.NO_MASK):
            self._put(seq, index, NO_TOKEN, None, None, finish, drafted)
            return
        logprobs = root.logprobs(output.token_id, output.logits) if root is not None and output.logits is not None else None
        self._put(seq, index, output.token_id, output.logits if request.logit_digests else None, logprobs, finish, drafted)

    def _root_choice(self, seq: int, request: DecodeRequest) -> RootChoice | None:
        if self._rank != 0 or not request.needs_all_logits:
            return None
        limit_s = self._args.step_timeout_s
        return RootChoice(seq, request, self._control, self._spec.vocab_size, step_timeout_s=limit_s)

    def _verify(
        self, seq: int, request: DecodeRequest, token_ids: Sequence[int], position: int, root: RootChoice | None
    ) -> list[StepOutput]:
        """One pass of the answer."""
        assert self._interpreter is not None
        return self._interpreter.verify(
            token_ids,
            position,
            request.sampling,
            request.logit_digests or request.needs_all_logits,
            stop=self._begin(seq),
            choose=root.choose if root is not None else None,
        )

    def _read(self, seq: int, token_ids: Sequence[int], position: int) -> StepOutput:
        """One pass of prompt tokens."""
        assert self._interpreter is not None
        stop = self._begin(seq)
        output = self._interpreter.read(token_ids, position, stop=stop)
        self._end(seq, position + len(token_ids))
        return output

    def _begin(self, seq: int) -> bool:
        """Of a pass: whether to stop after it. Rank 0 alone looks for a cancel; its decision reaches the others with the
        candidates of this pass.
        """
        if self._control.aborted():
            raise AbortedError(f"rank {self._rank} left request {seq} because the engine is being stopped")
        self._heartbeat.progress()
        return self._rank == 0 and self._control.cancelled(seq)

    def _end(self, seq: int, num_positions: int) -> None:
        assert self._comm is not None
        self._control.set_progress(self._rank, seq, num_positions)
        self._control.set_epoch_waits(self._rank, self._comm.waits)

    def _put(
        self,
        seq: int,
        index: int,
        token_id: int,
        digested: NDArray[Any] | None,
        logprobs: TokenLogprobs | None,
        finish: Finish,
        drafted: Drafted = NOT_DRAFTED,
    ) -> None:
        """Rank 0 hands a token out, with a digest of the logits `digested`; nothing once the engine is being stopped."""
        if self._rank != 0 or self._control.aborted():
            return
        digest = None
        if digested is not None:
            digest = hashlib.sha256(digested.astype("<f4", copy=False).tobytes()).digest()
        self._control.ring.put(seq, index, token_id, time.monotonic_ns(), digest, finish, logprobs, drafted)

    @property
    def _spec(self) -> ModelSpec:
        assert self._interpreter is not None
        return self._interpreter.plan.spec

    @property
    def _most_verified(self) -> int:
        assert self._interpreter is not None
        return self._interpreter.plan.num_tokens

    rouse = None

    def close(self) -> None:
        """See `Engine.close`."""
        self._heartbeat.close()
        self._interpreter = None
        if self._comm is not None:
            self._comm.close()
        if self._rendezvous is not None:
            self._rendezvous.close()


def _state_saves(kv: KvUse) -> list[KvCopy]:
    """Copies of the state that are made on the way, in order."""
    return [copy for copy in kv.copies if copy.kind is KvCopyKind.SAVE_STATE]
