"""Which requests on a GPU rank have drafts: in passes of their own, and where several run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.notes import note
from kog_dist.workers.cuda.draft_builds import PASS_TOKENS
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.draft_gain import DraftGain, gains_from_turns


class CudaDrafting:
    """`pass_tokens`: of a pass with drafts. `with_processors`: requests with processors may have drafts, too.

    `extra`: what a pass of several tokens takes more than one of a single token, in such passes.
    """

    def __init__(self, gpu: CudaRank) -> None:
        self._gpu = gpu
        self.pass_tokens, self.with_processors, self.extra = PASS_TOKENS, False, 0.0
        self._has_said_undrafted = False  # that a request has none

    @property
    def most_drafted(self) -> int:
        """Tokens of a pass that are drafted, at most."""
        return self.pass_tokens - 1 if self._gpu.args.drafts else 0

    def prediction(self, request: DecodeRequest) -> Sequence[int] | None:
        """What the answer may be like, if tokens are drafted; None: each has a pass of its own."""
        if not request.drafts or not self._gpu.args.drafts:
            return None
        if not request.logit_digests and (self.with_processors or not request.needs_all_logits):
            return request.prediction
        if not self._has_said_undrafted and self._gpu.rank == 0:
            processors = "" if self.with_processors else "a grammar, penalties, filters, log-probabilities or "
            note(f"requests with {processors}digests decode without drafts on GPUs")
        self._has_said_undrafted = True
        return None

    def follow(self, one: CudaRequest) -> None:
        """From here on its gain by drafts is to be known, if it may have any."""
        if one.gain is not None:
            one.gain.catch_up(one.answer)
        elif (prediction := self.prediction(one.request)) is not None:
            one.gain = DraftGain(one.request.prompt, prediction, one.answer, self.pass_tokens, self.extra)

    def gain_from_turns(self, sharing: Sequence[CudaRequest]) -> bool:
        """Whether all of them have passes of their own in turn, since they have so many right drafts."""
        gains = [one.gain for one in sharing if one.gain is not None]
        return len(gains) == len(sharing) > 1 and gains_from_turns(gains, self.extra)
