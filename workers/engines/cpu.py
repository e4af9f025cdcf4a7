"""The engine of a CPU rank: the plan's interpreter in NumPy, peers through shared memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.cpu import CpuCommunicator
from kog_dist.decode.cpu import host_library
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.cpu.passes import most_tokens, most_verified, pass_mailboxes, pass_sizes
from kog_dist.decode.cpu.pool_sizes import BLOCK_TOKENS, pool_slots
from kog_dist.decode.draft_lengths import SIZES, shared_out
from kog_dist.decode.drafts import LookupDrafter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.errors import AbortedError
from kog_dist.model.spec import ModelSpec
from kog_dist.runtime.abi import MOST_PARALLEL
from kog_dist.runtime.control import ControlPage, EpochWaits, KvLayout, RankState
from kog_dist.runtime.places import with_place
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.runtime.topology import LocalRendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines import forced_drafts
from kog_dist.workers.engines.agreement import agree, common_terms
from kog_dist.workers.engines.cpu_blocks import CpuBlocks
from kog_dist.workers.engines.cpu_requests import CpuRequest
from kog_dist.workers.engines.forced_drafts import ForcedDrafts
from kog_dist.workers.engines.heartbeat import Heartbeat
from kog_dist.workers.engines.opening import opened
from kog_dist.workers.engines.pass_costs import pass_costs
from kog_dist.workers.engines.root_choice import RootChoice
from kog_dist.workers.intake import Intake

HEARTBEAT_MARGIN_S = 2.0  # a wait that runs out of time says more than silence, so it comes first
MOST_NEW: Final = 3  # requests that all ranks take over between two passes; blocks of the control page hold no more


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
            + ([forced_drafts.mailbox(args.parallel)] if plan.num_tokens > 1 else []),
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
        for num_tokens in range(2, min(args.parallel, plan.num_tokens) + 1):
            self._interpreter.prepare(num_tokens)
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
    def run(self, seq: int, request: DecodeRequest, intake: Intake | None = None) -> Finish:
        """See `Engine.run`. Requests that come meanwhile join between two passes, as rank 0 says with the pass before."""
        with self._heartbeat:
            assert self._interpreter is not None
            first = self._begun(seq, request)
            running, turn = [first], 0
            while running:
                reading = [one for one in running if one.reads]
                if reading:  # one chunk of one prompt, in turns
                    turn += 1
                    self._read(reading[turn % len(reading)], running, intake)
                    running = self._going_on(running, intake)
                answering = [one for one in running if not one.reads]
                held = [one for one in answering if self._interpreter.heard >> MOST_PARALLEL + one.slot & 1]
                ready = [one for one in answering if one not in held] or ([] if reading else held[:1])
                for first_idx in range(0, len(ready), self._most_verified):
                    together = [one for one in ready[first_idx : first_idx + self._most_verified] if one.finish is Finish.NONE]
                    if together:
                        self._answer(together, running, intake)
                        running = self._going_on(running, intake)
            return first.finish

    def _begun(self, seq: int, request: DecodeRequest) -> CpuRequest:
        assert self._interpreter is not None
        has_root = self._rank == 0 and request.needs_all_logits
        drafter = LookupDrafter(request.prompt, request.prediction, self._costs) if self._may_draft(request) else None
        forced, comm = None, self._comm if self._interpreter.plan.world_size > 1 else None
        if drafter is not None and request.mask_epoch:
            forced = ForcedDrafts(request, self._control, comm, self._rank)
        root = None
        if has_root:
            limit_s = self._args.step_timeout_s
            root = RootChoice(seq, request, self._control, self._spec.vocab_size, step_timeout_s=limit_s)
        return CpuRequest(
            seq, request, self._control, self._interpreter, self.copy_blocks, root=root, drafter=drafter, forced=forced
        )

    def _may_draft(self, request: DecodeRequest) -> bool:
        return request.drafts and self._most_verified > 1

    def copy_blocks(self, kv: KvUse) -> None:
        """See `Engine.copy_blocks`."""
        assert self._blocks is not None, "the coordinator knows whether there is a pool"
        self._blocks.copy(kv)

    def _read(self, one: CpuRequest, running: Sequence[CpuRequest], intake: Intake | None) -> None:
        """A pass of prompt tokens."""
        assert self._interpreter is not None
        num_tokens = next(pass_sizes(one.num_unread, self._pass_tokens))
        word = self._begin(running, intake)
        part = one.prompt_part(num_tokens, stop=bool(word >> one.slot & 1))
        ((output,),) = self._interpreter.run((part,), word=word)
        one.was_read(num_tokens, stopped=output.stopped)

    def _answer(self, together: Sequence[CpuRequest], running: Sequence[CpuRequest], intake: Intake | None) -> None:
        """A pass of the answers of these: a token of each, and drafts in what is left of the pass."""
        assert self._interpreter is not None
        word, has_company = self._begin(running, intake), len(running) > 1
        room = self._most_verified - len(together)
        nums = shared_out([one.outlook(room, has_company=has_company) for one in together], room)
        parts = [one.answer_part(num, stop=bool(word >> one.slot & 1)) for one, num in zip(together, nums, strict=True)]
        gathers = any(one.needs_all_logits for one in together)
        for one, outputs in zip(together, self._interpreter.run(parts, gathers, word=word), strict=True):
            one.took(outputs)

    def _begin(self, running: Sequence[CpuRequest], intake: Intake | None) -> int:
        """Of a pass: what rank 0 says with it to all ranks, which hear it with the candidates. Which requests are to end; which
        wait for their grammar; how many new ones there are.
        """
        if self._control.aborted():
            raise AbortedError(f"rank {self._rank} left request {running[0].seq} because the engine is being stopped")
        self._heartbeat.progress()
        if self._rank != 0:
            return 0
        word = sum(1 << one.slot for one in running if self._control.cancelled(one.seq, one.slot))
        if len(running) > 1:
            word |= sum(1 << MOST_PARALLEL + one.slot for one in running if one.lacks_first_mask)
        return word | (min(intake.num_new, MOST_NEW) << 2 * MOST_PARALLEL if intake is not None else 0)

    def _going_on(self, running: Sequence[CpuRequest], intake: Intake | None) -> list[CpuRequest]:
        """Those that go on behind a pass, and those that have come."""
        assert self._interpreter is not None
        assert self._comm is not None
        self._control.set_epoch_waits(self._rank, self._comm.waits)
        heard = self._interpreter.heard
        for one in running:
            if one.finish is Finish.NONE and heard >> one.slot & 1:
                one.cancel()
        going_on = [one for one in running if one.finish is Finish.NONE]
        for _ in range(heard >> 2 * MOST_PARALLEL):
            assert intake is not None
            seq, request = intake.take()
            if request.only_copies:
                self.copy_blocks(request.kv)
            else:
                going_on.append(self._begun(seq, request))
        return going_on

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
