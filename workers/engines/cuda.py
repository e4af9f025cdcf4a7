"""The engine of a GPU rank: the monokernel decodes in chunks of many tokens; the host hands out what it writes.

With several ranks every one of them reads the request, launches the same numbers of steps and takes the tokens from its own ring;
rank 0 alone writes the token ring, heeds a cancel and reports log-probabilities. Whatever ends an answer is decided alike by all
kernels. How far ranks are apart in time does not matter.

Here a rank starts and ends; `cuda_requests.py` runs its requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from kog_dist.decode.plan.validate import check
from kog_dist.decode.request import DecodeRequest, KvUse
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.cuda.company_build import company_shape, company_sizes
from kog_dist.workers.cuda.draft_builds import drafting_shape, drafts_processors
from kog_dist.workers.cuda.kernel_plan import kernel_plan
from kog_dist.workers.cuda.kernel_words import check_words
from kog_dist.workers.engines.choice_check import ChoiceCheck
from kog_dist.workers.engines.cuda_caches import CudaCaches
from kog_dist.workers.engines.cuda_device import device_index, kernel_shapes, translated_errors, use_device
from kog_dist.workers.engines.cuda_drafting import CudaDrafting
from kog_dist.workers.engines.cuda_peers import CudaPeers
from kog_dist.workers.engines.cuda_programs import compile_ahead
from kog_dist.workers.engines.cuda_prompts import min_prefill_tokens
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_requests import CudaRequests
from kog_dist.workers.engines.cuda_start import Start
from kog_dist.workers.engines.cuda_trial import StartTrial
from kog_dist.workers.engines.opening import opened
from kog_dist.workers.intake import Intake

if TYPE_CHECKING:
    from kog_dist.collectives.cuda_heap import CudaHeap
    from kog_dist.model.checkpoint import Checkpoint
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel

ALONE_WAIT_US = 500_000  # longest wait on the device
AMONG_PEERS_WAIT_US = 2_000_000  # hosts start their launches at different times; a stopped one is found sooner, by its heartbeat


class CudaEngine:
    """See `Engine`. Hosts its rank's lanes of the model on one GPU."""

    def __init__(self, args: WorkerArgs, control: ControlPage) -> None:
        self._gpu = gpu = CudaRank(args, control)
        self._caches, self._drafting = CudaCaches(gpu), CudaDrafting(gpu)
        self._requests = CudaRequests(gpu, self._caches, self._drafting)
        self._start = StartTeller(partial(control.set_startup, gpu.rank))

    def startup(self) -> None:
        """See `Engine.startup`. Nothing is allocated or loaded any more once a kernel may wait for a peer."""
        gpu, args = self._gpu, self._gpu.args
        deadline = Deadline.after(args.startup_timeout_s)
        gpu.control.set_state(gpu.rank, RankState.LOADING)
        self._start.begin(StartStage.CHECKPOINT)
        checkpoint = opened(args, gpu.control.max_context)
        shapes = kernel_shapes(
            checkpoint,
            args.kv_dtype,
            args.info.world_size,
            whole_windows=args.whole_windows,
            checks_experts=args.check_experts,
        )
        own = shapes[gpu.rank]
        self._check_builds(own)
        plan = kernel_plan(shapes)
        check(plan)
        with translated_errors(args.device), self._start.hearing_compilers():
            self._start.begin(StartStage.DEVICE)
            use_device(args.device)
            if args.info.world_size > 1:
                self._meet_peers(CudaPeers(args, gpu.control, shapes, deadline), checkpoint, plan.digest())
            else:
                compile_ahead(shapes, args)
            kernel = self._load(checkpoint, own)
            gpu.choices = self._choice_check(own)
            self._caches.make(own, kernel, self._drafting.most_drafted)
            gpu.max_context = checkpoint.spec.max_context
            StartTrial(gpu, self._drafting, self._start).run()

    def _check_builds(self, own: KernelShape) -> None:
        """Of passes of several tokens. Raises PlanError if words of their thread blocks could be lost."""
        args = self._gpu.args
        of_drafts = [drafting_shape(own)] if args.drafts else []
        self._drafting.pass_tokens = of_drafts[0].tokens if of_drafts else 1
        for build in (*of_drafts, *(company_shape(own, size) for size in company_sizes(own, args.parallel))):
            check_words(build)

    def _meet_peers(self, peers: CudaPeers, checkpoint: Checkpoint, plan_digest: str) -> None:
        """Agree with the other ranks on what all are about to run, and have its programs in the cache."""
        self._gpu.peers = peers
        self._start.begin(StartStage.PEERS)
        peers.agree(checkpoint, plan_digest, device_index(self._gpu.args.device))
        peers.build()

    def _load(self, checkpoint: Checkpoint, shape: KernelShape) -> Monokernel:
        """Make the kernel, with the weights of this rank, and prefill if it is wanted and can be had."""
        gpu, drafting = self._gpu, self._drafting
        peers = gpu.peers
        drafting.with_processors = gpu.args.drafts and drafts_processors(shape)
        self._requests.prompts.min_tokens = min_prefill_tokens(shape)
        kernel, gpu.prefill = Start(
            gpu.args,
            shape,
            checkpoint,
            gpu.control.mask_slots,
            tell=self._start,
            limit_us=ALONE_WAIT_US if peers is None else AMONG_PEERS_WAIT_US,
            link=lambda tokens: None if peers is None else self._link(peers, tokens),
            sums=None if peers is None else peers.prefill_sums,
            forced=gpu.control.forced_slots if drafting.with_processors else None,
            first_cause=str if peers is None else partial(self._first_cause, peers),
        ).load()
        gpu.loaded = kernel
        return kernel

    def _choice_check(self, shape: KernelShape) -> ChoiceCheck | None:
        """What compares the experts that are chosen, if that is wanted."""
        gpu, experts = self._gpu, shape.spec.experts
        if not gpu.args.check_experts or experts is None:
            return None
        gather = gpu.peers.gather_choices if gpu.peers is not None else lambda own: [own]
        return ChoiceCheck(gpu.rank, experts.per_token, gather)

    def _link(self, peers: CudaPeers, prefill_tokens: int) -> CudaHeap:
        """The memory that all ranks have mapped, with room for prefill in chunks of so many tokens."""
        with self._linking():
            return peers.link(device_index(self._gpu.args.device), prefill_tokens)

    def _first_cause(self, peers: CudaPeers, cause: str) -> str:
        """See `CudaPeers.first_cause`."""
        with self._linking():
            return peers.first_cause(cause)

    @contextmanager
    def _linking(self) -> Iterator[None]:
        """Say meanwhile that this rank waits, so that the launcher names the rank that others wait for."""
        gpu = self._gpu
        gpu.control.set_state(gpu.rank, RankState.LINKING)
        with self._start.during(StartStage.PEERS):
            yield
        gpu.control.set_state(gpu.rank, RankState.LOADING)

    def copy_blocks(self, kv: KvUse) -> None:
        """See `Engine.copy_blocks`. They are queued: what comes next is queued behind them."""
        with self._working():
            self._caches.copy(kv)

    def run(self, seq: int, request: DecodeRequest, intake: Intake | None = None) -> Finish:
        """See `Engine.run`. Requests that come meanwhile take turns with it, where there are slots for several."""
        with self._working():
            return self._requests.run(seq, request, intake)

    def rouse(self) -> None:
        """See `Engine.rouse`. The first call of the driver after a pause takes 0.2 ms longer."""
        with self._working():
            self._gpu.kernel.rouse()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The rank beats, and what the driver raises is translated."""
        with translated_errors(self._gpu.args.device), self._gpu.heartbeat:
            yield

    def close(self) -> None:
        """See `Engine.close`. The kernel leaves before memory that it uses is unmapped; bounded also when peers are gone."""
        gpu = self._gpu
        gpu.heartbeat.close()
        if gpu.loaded is not None:
            gpu.loaded.abort()
            with suppress(Exception):  # a context that has failed has nothing running
                gpu.loaded.stream.synchronize()
        self._caches.close()
        gpu.prefill = None  # its graphs use the kernel's memory and the peers'
        if gpu.peers is not None:
            gpu.peers.close()
        if gpu.loaded is not None:
            gpu.loaded.close()
        gpu.loaded = gpu.peers = None
