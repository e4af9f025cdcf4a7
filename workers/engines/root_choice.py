"""What rank 0 does for a request that is shaped: it chooses each token from all logits, and reports log-probabilities."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from kog_dist.control import DecodeRequest
from kog_dist.decode.cursor import Choose
from kog_dist.decode.sampling import Candidate, Sampling, Shaper, TokenLogprobs, token_logprobs


class RootChoice:
    """Of one request. Ask for `choose_at` before each sampled token, and tell `took` what all ranks agreed on."""

    def __init__(self, request: DecodeRequest, vocab_size: int) -> None:
        self._num_top = request.logprobs
        self._shaper: Shaper | None = None
        if request.shaping.is_needed(request.temperature):
            sampling = Sampling(request.temperature, request.seed)
            self._shaper = Shaper(vocab_size, request.prompt, sampling, request.shaping, request.end_ids)

    def choose_at(self, position: int) -> Choose | None:
        """The choice for the successor of the token at `position`; None if it is that of plain sampling."""
        shaper = self._shaper
        if shaper is None:
            return None

        def choose(logits: NDArray[Any]) -> Candidate:
            return shaper.choose(logits, position)

        return choose

    def took(self, token_id: int, logits: NDArray[Any]) -> TokenLogprobs | None:
        """Remember a token of the answer; its log-probabilities, if they are wanted."""
        if self._shaper is not None:
            self._shaper.accept(token_id)
        return None if self._num_top is None else token_logprobs(logits, token_id, self._num_top)
