"""Chooses the tokens of a request with logits processors, at the rank that has all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.sampling.bits import gumbel, gumbel_of
from kog_dist.decode.sampling.choice import NO_CANDIDATE, Candidate
from kog_dist.decode.sampling.processors import adjust, select
from kog_dist.late_numpy import Array
from kog_dist.runtime.masks import MaskWords
from kog_dist.sampling_params import SamplingParams


class Sampler:
    """The logits processors of `params`, with the memory that the penalties need.

    `stop_ids`: the ids that would end the answer. Call `choose` for each token, then `accept` with what was chosen.
    """

    def __init__(self, vocab_size: int, prompt: Sequence[int], params: SamplingParams, stop_ids: Sequence[int] = ()) -> None:
        self._params = params
        self._ids = np.arange(vocab_size)
        self._stop_ids = list(stop_ids)
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[list(prompt)] = True
        self._counts = np.zeros(vocab_size, np.int32)
        self._num_accepted = 0

    def accept(self, token_id: int) -> None:
        """Remember a token of the answer."""
        self._seen[token_id] = True
        self._counts[token_id] += 1
        self._num_accepted += 1

    def choose(self, logits: Array, position: int, mask: MaskWords | None = None) -> Candidate:
        """The next token and its score; `logits` (vocab,) as the model gave them, `position` as in `choice.candidate`.

        `mask`: bit id % 32 of word id // 32 says whether a grammar allows the id. The value is NaN if a logit is not finite, or
        the x of an allowed id; NO_CANDIDATE if the mask allows nothing.
        """
        if not np.isfinite(logits).all():
            return Candidate(math.nan, 0)
        adjusted = adjust(logits, self._params, self._seen, self._counts)
        ids = self._allowed(mask)
        if len(ids) == 0:
            return NO_CANDIDATE
        x = adjusted if len(ids) == len(adjusted) else adjusted[ids]
        temperature = self._params.temperature
        if temperature > 0:
            with np.errstate(over="ignore"):  # is not finite then
                x = x * (np.float32(1.0) / np.float32(temperature))
        if not np.isfinite(x).all():
            return Candidate(math.nan, 0)
        if temperature > 0:
            kept = np.sort(select(x, self._params))
            ids = ids[kept]
            x = x[kept] + self._noise(position, ids)
        best = int(x.argmax())  # the first of equal ones, which is the lower id
        return Candidate(float(x[best]), int(ids[best]))

    def _noise(self, position: int, ids: NDArray[np.intp]) -> NDArray[np.float32]:
        """That of few ids by themselves, of many by way of the whole vocabulary, where four ids share one call of Philox."""
        seed, vocab_size = self._params.seed, len(self._ids)
        return gumbel_of(seed, position, ids) if 4 * len(ids) < vocab_size else gumbel(seed, position, 0, vocab_size)[ids]

    def _allowed(self, mask: MaskWords | None) -> NDArray[np.intp]:
        """Step 5: the allowed ids, ascending."""
        ids = self._ids
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=len(ids), bitorder="little")
            ids = ids[bits.view(np.bool_)]
        if self._num_accepted < self._params.min_tokens and self._stop_ids:
            going_on = ids[~np.isin(ids, self._stop_ids)]
            ids = going_on if len(going_on) else ids
        return ids
