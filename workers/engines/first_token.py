"""The first token of an answer, chosen by the host from the logits that prefill leaves."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kog_dist.control import DecodeRequest
from kog_dist.decode.ring import NO_TOKEN, Finish
from kog_dist.decode.sampling import Sampling, candidate, gumbel


class FirstToken:
    """Of a request that is not shaped. After `choose`: the token, or NO_TOKEN, and whether the answer ends with it."""

    def __init__(self, request: DecodeRequest, max_context: int) -> None:
        self._request, self._position = request, len(request.prompt) - 1
        self._is_last = request.max_tokens == 1 or self._position + 2 >= max_context
        self._noise: NDArray[np.float32] | None = None
        self.token_id, self.finish = NO_TOKEN, Finish.NONE

    def prepare(self, vocab_size: int) -> None:
        """Make the noise of a temperature, which takes about a millisecond, while logits are on their way."""
        if self._request.temperature > 0:
            self._noise = gumbel(self._request.seed, self._position, 0, vocab_size)

    def choose(self, logits: NDArray[np.float32], *, cancelled: bool) -> None:
        """As the kernel does it."""
        if cancelled:
            self.finish = Finish.CANCELLED
            return
        sampling = Sampling(self._request.temperature, self._request.seed)
        best = candidate(logits, 0, self._position, sampling, self._noise)
        assert not math.isnan(best.value), "prefill hands out finite logits alone"
        self.token_id = best.token_id
        if best.token_id in self._request.end_ids:
            self.finish = Finish.STOP
        elif self._is_last:
            self.finish = Finish.LENGTH
