"""Greedy and temperature sampling: the best candidate, slice by slice.

Greedy takes the largest logit. With a temperature T the token is the largest `logit * (1 / T) + gumbel` (the Gumbel-max trick:
this draws from softmax(logits / T)), where `gumbel` depends only on (seed, position, vocabulary id). Ties go to the lower id.
So the choice can be made slice by slice, in any order and on any number of ranks, with the same result. float32, each of the
three operations rounded on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.sampling.bits import gumbel
from kog_dist.late_numpy import Array
from kog_dist.sampling_params import SamplingParams


class Candidate(NamedTuple):
    """Best token of some slice of the vocabulary. `value` is NaN if any logit of the slice was not finite."""

    value: float
    token_id: int


NO_CANDIDATE = Candidate(-math.inf, 0)  # of an empty slice


def candidate(
    logits_slice: Array, first_id: int, position: int, params: SamplingParams, noise: NDArray[np.float32] | None = None
) -> Candidate:
    """The best token of one slice of logits (rows,), which starts at vocabulary id `first_id`.

    `position` is that of the token that was fed in (its successor is being chosen). `noise`: the slice's `gumbel`, if the caller
    has it already.
    """
    if len(logits_slice) == 0:
        return NO_CANDIDATE
    if not np.isfinite(logits_slice).all():
        return Candidate(math.nan, first_id)
    scores = logits_slice
    if params.temperature > 0:
        inverse = np.float32(1.0) / np.float32(params.temperature)
        scores = logits_slice.astype(np.float32, copy=False) * inverse
        scores += gumbel(params.seed, position, first_id, len(scores)) if noise is None else noise
    best = int(scores.argmax())  # the first of equal ones, which is the lower id
    return Candidate(float(scores[best]), first_id + best)


def pick(candidates: Iterable[Candidate]) -> Candidate:
    """The best of several slices: the larger value, ties to the lower id; NaN if any slice had a logit that is not finite."""
    best: Candidate | None = None
    for other in candidates:
        if math.isnan(other.value):
            return other
        if best is None or other.value > best.value or (other.value == best.value and other.token_id < best.token_id):
            best = other
    if best is None:
        raise ValueError("there is no candidate to pick from")
    return best


def sample(logits: Array, position: int, params: SamplingParams) -> int:
    """The token chosen from all logits (vocab,). Raises ValueError if any is not finite."""
    best = candidate(logits, 0, position, params)
    if math.isnan(best.value):
        raise ValueError(f"logits of position {position} are not all finite; no token can be chosen from them")
    return best.token_id
