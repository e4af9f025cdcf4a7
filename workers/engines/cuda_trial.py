"""The trial of a GPU rank: a token that shows, before any request, that its kernel and prefill run and its peers answer."""

from __future__ import annotations

from kog_dist.errors import KogError, LaunchError
from kog_dist.runtime.control import RankState
from kog_dist.runtime.notes import note
from kog_dist.runtime.startup import StartStage, StartTeller
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.engines.cuda_drafting import CudaDrafting
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_start import Prefiller, cause_of, free_memory, refusal
from kog_dist.workers.prefill.prefill import ended


class StartTrial:
    """Of one rank, once all is loaded. `start`: hears of its stages."""

    def __init__(self, gpu: CudaRank, drafting: CudaDrafting, start: StartTeller) -> None:
        self._gpu, self._drafting, self._start = gpu, drafting, start

    def run(self) -> None:
        """Maps everything. Collective. Raises LaunchError where something does not run that must."""
        gpu = self._gpu
        gpu.kernel.begin((0,), 1, SamplingParams())  # for which cupy may have to compile
        if gpu.peers is not None:
            gpu.control.set_state(gpu.rank, RankState.LINKING)
            self._start.begin(StartStage.PEERS)
            gpu.peers.meet()  # all have loaded all, so nobody's first wait is for somebody's weights
        self._start.begin(StartStage.TRIAL)
        if gpu.prefill is not None:
            gpu.prefill = self._tried(gpu.prefill)
            if gpu.prefill is None:
                free_memory()
        self._decode()
        if gpu.takes_turns:
            gpu.kernel.try_together()
        if gpu.args.drafts:
            self._measure_drafts()

    def _decode(self) -> None:
        """The token. All ranks must have the same one."""
        gpu = self._gpu
        gpu.kernel.launch(1)
        gpu.await_launches("left its trial")
        gpu.kernel.finish()
        gpu.compare_choices()
        entry = gpu.kernel.token(0)
        if entry is None:
            raise LaunchError(f"rank {gpu.rank}: the kernel ended its trial without a token; start the engine again")
        if gpu.peers is not None:
            gpu.peers.compare_trials(entry.token_id)

    def _measure_drafts(self) -> None:
        """Find out what passes with drafts cost, by which all ranks go then. They write the first KV cache."""
        gpu, drafting = self._gpu, self._drafting
        costs = gpu.kernel.measure_drafts()
        if gpu.peers is not None:
            costs = gpu.peers.share_costs(costs)
        gpu.kernel.set_draft_costs(costs)
        drafting.extra = costs.extra
        factor = 1 + costs.extra
        note(f"passes with drafts have {drafting.pass_tokens} tokens, and take {factor:.2f} times as long as those of one")
        if gpu.prefill is not None:
            gpu.prefill.forget(0)

    def _tried(self, prefill: Prefiller) -> Prefiller | None:
        """Prefill if it runs; with `auto` None if not, and the kernel's own trial shows whether the GPU is still usable.

        Among several ranks an error here is the end, since the others may be anywhere in theirs; that a value leaves the range
        of its type they all know.
        """
        gpu = self._gpu
        ids, cause = (0,) * 2, ""
        try:
            steps = prefill.steps(
                ids,
                0,
                should_stop=lambda: False,
                aborted=gpu.control.aborted,
                on_progress=lambda _: None,
                on_queued=lambda: None,
                pauses=lambda: False,
            )
            reached = ended(steps)
            if gpu.control.aborted():
                return prefill  # the kernel's own trial ends, too
            if reached < len(ids):
                cause = "a value of two tokens leaves the range of its binary16"
        except Exception as error:
            if isinstance(error, KogError) and not isinstance(error, LaunchError):
                raise
            cause = cause_of(error)
            if gpu.peers is not None:
                raise refusal(cause) from error
        if cause and gpu.args.prefill == "on":
            raise refusal(cause)
        if cause:
            note(f"prompts go token by token, since prefill failed on trial: {cause}")
            return None
        prefill.forget(0)
        gpu.control.set_prefill(gpu.rank)
        if gpu.rank == 0:
            note("prompts go through prefill, in chunks of many tokens")
        return prefill
