"""What rank 0 does for a request that needs all logits: it chooses each token from all logits, and reports log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from kog_dist.decode.cpu.cursor import Choose
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.sampling import NO_CANDIDATE, Candidate, Sampler, token_logprobs
from kog_dist.errors import AbortedError
from kog_dist.late_numpy import Array
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.masks import MaskWords
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.wait import Deadline, WaitResult, wait

Tell: TypeAlias = Callable[[int, int, Array], bool]

MASK_TIMEOUT_S = 5.0  # a mask takes well below a millisecond, and the grammar process has a whole step for it; not the first


class RootChoice:
    """Of one request. `choose` is for the interpreter, None where the choice is that of plain sampling.

    `failure`: why the choice was None, which ends the request.
    """

    def __init__(self, seq: int, request: DecodeRequest, control: ControlPage, vocab_size: int, *, step_timeout_s: float) -> None:
        """`step_timeout_s`: how long the other ranks wait for this one; a mask may take at most half of it."""
        self._seq, self._request, self._control = seq, request, control
        self._first_timeout_s, self._mask_timeout_s = step_timeout_s / 2, min(MASK_TIMEOUT_S, step_timeout_s / 2)
        self._num_chosen = 0
        self._first_position = 0
        self._last: tuple[int, Array] | None = None  # the choice before, and its logits
        self._tell: Tell = lambda *_: True
        self.failure = Finish.NONE
        self._sampler: Sampler | None = None
        if request.has_processors:
            self._sampler = Sampler(vocab_size, request.prompt, request.sampling, request.end_ids)

    def begin_pass(self, position: int, tell: Tell) -> None:
        """The next choices are behind the token at `position` and those after it. `tell` is called with each but the last one,
        its number in the pass and its logits, before the mask of the next one is waited for, which is made of it; false: the
        answer has ended.
        """
        self._first_position, self._tell = position, tell

    @property
    def choose(self) -> Choose | None:
        """Called for each token of the answer in turn; what it chooses stands there, which those after it depend on."""
        return None if self._sampler is None else partial(self._choose, self._sampler)

    def _choose(self, sampler: Sampler, logits: Array, position: int) -> Candidate | None:
        mask = None
        if self._request.mask_epoch:
            if (idx := position - self._first_position) and self._last is not None and not self._tell(idx - 1, *self._last):
                return Candidate(0.0, 0)  # nobody looks at it
            mask = self._wait_mask()
            if mask is None:
                return None
        best = sampler.choose(logits, position, mask)
        if best == NO_CANDIDATE:
            self.failure = Finish.NO_MASK
            return None
        if not math.isnan(best.value):
            sampler.accept(best.token_id)
            self._num_chosen += 1
            self._last = (best.token_id, logits)
        return best

    def logprobs(self, token_id: int, logits: Array) -> TokenLogprobs | None:
        """Of a token of the answer, if they are wanted."""
        num_top = self._request.sampling.logprobs
        return None if num_top is None else token_logprobs(logits, token_id, num_top)

    def _wait_mask(self) -> MaskWords | None:
        """The mask of the next token. None, with the reason in `failure`, if the request must end without it."""
        control, epoch = self._control, self._request.mask_epoch + self._num_chosen
        found: MaskWords | None = None

        def ready() -> bool:
            nonlocal found
            found = control.mask_slots[self._request.decode_slot].get(epoch)
            return found is not None

        result = wait(
            ready,
            aborted=lambda: control.aborted() or control.cancelled(self._seq, self._request.decode_slot),
            deadline=Deadline.after(self._mask_timeout_s if self._num_chosen else self._first_timeout_s),
        )
        if result is WaitResult.ABORT and control.aborted():
            raise AbortedError(f"rank 0 left request {self._seq} because the engine is being stopped")
        if result is not WaitResult.OK:
            self.failure = Finish.CANCELLED if result is WaitResult.ABORT else Finish.NO_MASK
        return found
