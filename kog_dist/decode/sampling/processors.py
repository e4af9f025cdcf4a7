"""Logits processors: which tokens are allowed and with what scores, where a request asks for more than a temperature.

They are applied in this order (that of vLLM; Hugging Face differs in having min-p after top-p). float32, every operation rounded
on its own, no sum whose result depends on the order of additions:
 1. bias        logit = logit + bias
 2. repetition  of an id in the prompt or the answer so far: logit * penalty if logit < 0, else logit / penalty
 3. frequency   logit = logit - frequency * (times that the id stands in the answer so far)
 4. presence    logit = logit - presence, of an id that stands in the answer so far
 5. mask        ids that the mask of a grammar leaves out are not allowed; then, for the first min_tokens tokens, those that
                would end the answer, unless nothing else is left
    Temperature 0 takes the largest logit that is allowed, ties to the lower id, and is done. Otherwise:
 6. temperature x = logit * (1 / T); distance = x - (largest allowed x). The order of tokens: larger x first, equal ones by id.
 7. min-p       allowed stay those with distance >= log(min_p)
 8. top-k       the first k in the order
 9. top-p       the longest beginning of the order in which every token has less than top_p of the mass before it; the first one
                always stays. Masses are integers (`bits.masses` of the distances), and so is the limit: ceil(top_p * their sum)
10. the largest x + gumbel among the allowed, ties to the lower id.
Every filter keeps a beginning of the order, so that a token's own place in it (how many ids, how much mass come before) says
whether it is allowed: a kernel needs no sorting (docs/sampling.md).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.sampling.bits import log32, masses
from kog_dist.late_numpy import Array
from kog_dist.sampling_params import SamplingParams

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_SMALLEST: Final = np.float32(2.0**-126)  # of the normal float32 numbers, which `log32` takes
_TOP_P_BITS: Final = 64  # top_p as a fixed-point number: exact for every double of at least 2**-11


def adjust(logits: Array, params: SamplingParams, seen: NDArray[np.bool_], counts: NDArray[np.int32]) -> Floats:
    """Steps 1 to 4, as new float32 logits (vocab,). `seen`: stands in prompt or answer; `counts`: times in the answer."""
    adjusted = logits.astype(np.float32)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        adjusted[list(ids)] += np.array(biases, np.float32)
    if params.repetition_penalty != 1:
        penalty, found = np.float32(params.repetition_penalty), adjusted[seen]
        adjusted[seen] = np.where(found < 0, found * penalty, found / penalty)
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        (said,) = counts.nonzero()
        adjusted[said] -= np.float32(params.frequency_penalty) * counts[said].astype(np.float32)
        adjusted[said] -= np.float32(params.presence_penalty)
    return adjusted


def select(x: Floats, params: SamplingParams) -> Ids:
    """Steps 7 to 9: indices into `x` (n,) of what stays, in no particular order.

    `x`: of the allowed tokens, by ascending id, at least one, all finite.
    """
    kept = np.arange(len(x))
    if not params.has_filters:
        return kept
    with np.errstate(over="ignore"):  # to minus infinity: no mass
        distance = x - x.max()
    if params.min_p > 0:
        kept = kept[distance >= lowest_distance(params.min_p)]
    if params.top_k > 0:
        kept = kept[in_order(x[kept], params.top_k)]
    if params.top_p < 1:
        order = kept[in_order(x[kept])]
        mass = masses(distance[order])
        after = np.cumsum(mass)
        before = after - mass
        total = int(after[-1])
        limit = -(-total * fixed_top_p(params.top_p) >> _TOP_P_BITS)  # rounded up, at least 1
        kept = order[before < np.uint64(limit)]
    return kept


def lowest_distance(min_p: float) -> np.float32:
    """The least distance from the largest x that min-p keeps; minus infinity if it keeps all."""
    if min_p == 0:
        return np.float32(-np.inf)
    return np.float32(log32(np.maximum(np.float32(min_p), _SMALLEST).reshape(1))[0])


def fixed_top_p(top_p: float) -> int:
    """`top_p` in units of 2**-64."""
    return int(top_p * 2.0**_TOP_P_BITS)


def in_order(x: Array, count: int | None = None) -> Ids:
    """Indices of the first `count` (all) values of `x` (n,) in the order: larger first, equal ones by index."""
    candidates = np.arange(len(x))
    if count == 0:
        return candidates[:0]
    if count is not None and count < len(x):
        candidates = candidates[x >= np.partition(x, len(x) - count)[len(x) - count]]
    return candidates[np.argsort(-x[candidates], kind="stable")][:count]
