"""How a request is set up in the kernel of a GPU rank, and its first launches are queued."""

from __future__ import annotations

from functools import partial

from kog_dist.runtime.stages import RankStage
from kog_dist.workers.cuda.processors import ProcessedRequest
from kog_dist.workers.engines.cuda_caches import CudaCaches
from kog_dist.workers.engines.cuda_drafting import CudaDrafting
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.launches import Launches


class CudaLauncher:
    """Of one rank."""

    def __init__(self, gpu: CudaRank, caches: CudaCaches, drafting: CudaDrafting) -> None:
        self._gpu, self._caches, self._drafting = gpu, caches, drafting

    def begin(self, one: CudaRequest, num_cached: int) -> Launches:
        """Set up a request in the kernel and queue its first launches. The KV cache holds `num_cached` positions, or will when
        the launches begin: if it holds all, prefill leaves the last token's streams.
        """
        gpu, request, first, streams = self._gpu, one.request, num_cached, None
        if num_cached == len(request.prompt) and gpu.prefill is not None:
            first, streams = num_cached - 1, gpu.prefill.streams
        max_tokens = gpu.max_tokens(request)
        processed = ProcessedRequest(request.sampling, request.mask_epoch) if request.needs_all_logits else None
        prediction = self._drafting.prediction(request)
        gpu.kernel.begin(
            request.prompt,
            max_tokens,
            request.sampling,
            request.end_ids,
            first_position=first,
            processed=processed,
            streams=streams,
            prediction=prediction,
            cache=one.cache,
        )
        if gpu.choices is not None:
            gpu.choices.begin(first)
        self._caches.goes(one.cache)
        launches = Launches(
            gpu.kernel,
            len(request.prompt) - 1 - first,
            max_tokens,
            one_by_one=request.logit_digests,
            check=None if gpu.choices is None else gpu.compare_choices,
            has_drafts=prediction is not None,
            takes_turns=gpu.takes_turns,
            has_peers=gpu.peers is not None,
            leaves_early=gpu.takes_turns and prediction is not None and processed is None,
            company_steps=one.company_steps,
            stops=[save.place - first for save in one.saves],
            at_stop=partial(self._caches.save_state, one),
            first_position=first,
        )
        gpu.tell(RankStage.LAUNCHED, one.slot)
        return launches
