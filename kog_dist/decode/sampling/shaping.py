"""Which tokens are allowed and with what scores: the processors of a request that asks for more than a temperature.

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

from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.sampling.bits import log32, masses
from kog_dist.rpc.fields import check_shaping

Floats = NDArray[np.float32]
Ids = NDArray[np.intp]

_SMALLEST: Final = np.float32(2.0**-126)  # of the normal float32 numbers, which `log32` takes
_TOP_P_BITS: Final = 64  # top_p as a fixed-point number: exact for every double of at least 2**-11


@dataclass(frozen=True, slots=True)
class Shaping:
    """What a request asks for besides temperature and seed; the defaults change nothing. Raises ValueError, a sentence.

    top_k: 0 = all. logit_bias: (id, bias) pairs, each id once. min_tokens: so many tokens come before one that ends the answer.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        check_shaping({name: getattr(self, name) for name in self.__slots__}, self.logit_bias)

    @classmethod
    def of(cls, *values: Any) -> Shaping:
        """A `Shaping` of all its values in order; UNSHAPED, which need not be checked, for almost every request."""
        return UNSHAPED if values == _UNSHAPED_VALUES else cls(*values)

    def has_penalties(self) -> bool:
        """Whether logits depend on what was said."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p leave anything out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    def is_needed(self, temperature: float) -> bool:
        """Whether the choice can differ from that of `choice.candidate`: filters keep the best token, so greedy ignores them."""
        return self.has_penalties() or bool(self.logit_bias) or self.min_tokens > 0 or (temperature > 0 and self.has_filters())


UNSHAPED: Final = Shaping()
_UNSHAPED_VALUES: Final = astuple(UNSHAPED)


def adjust(logits: NDArray[Any], shaping: Shaping, seen: NDArray[np.bool_], counts: NDArray[np.int32]) -> Floats:
    """Steps 1 to 4, as new float32 logits (vocab,). `seen`: stands in prompt or answer; `counts`: times in the answer."""
    adjusted = logits.astype(np.float32)
    if shaping.logit_bias:
        ids, biases = zip(*shaping.logit_bias, strict=True)
        adjusted[list(ids)] += np.array(biases, np.float32)
    if shaping.repetition_penalty != 1:
        penalty, found = np.float32(shaping.repetition_penalty), adjusted[seen]
        adjusted[seen] = np.where(found < 0, found * penalty, found / penalty)
    if shaping.frequency_penalty != 0 or shaping.presence_penalty != 0:
        (said,) = counts.nonzero()
        adjusted[said] -= np.float32(shaping.frequency_penalty) * counts[said].astype(np.float32)
        adjusted[said] -= np.float32(shaping.presence_penalty)
    return adjusted


def select(x: Floats, shaping: Shaping) -> Ids:
    """Steps 7 to 9: indices into `x` (n,) of what stays, in no particular order.

    `x`: of the allowed tokens, by ascending id, at least one, all finite.
    """
    kept = np.arange(len(x))
    if not shaping.has_filters():
        return kept
    with np.errstate(over="ignore"):  # to minus infinity: no mass
        distance = x - x.max()
    if shaping.min_p > 0:
        kept = kept[distance >= lowest_distance(shaping.min_p)]
    if shaping.top_k > 0:
        kept = kept[in_order(x[kept], shaping.top_k)]
    if shaping.top_p < 1:
        order = kept[in_order(x[kept])]
        mass = masses(distance[order])
        after = np.cumsum(mass)
        before = after - mass
        total = int(after[-1])
        limit = -(-total * fixed_top_p(shaping.top_p) >> _TOP_P_BITS)  # rounded up, at least 1
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


def in_order(x: NDArray[Any], count: int | None = None) -> Ids:
    """Indices of the first `count` (all) values of `x` (n,) in the order: larger first, equal ones by index."""
    candidates = np.arange(len(x))
    if count == 0:
        return candidates[:0]
    if count is not None and count < len(x):
        candidates = candidates[x >= np.partition(x, len(x) - count)[len(x) - count]]
    return candidates[np.argsort(-x[candidates], kind="stable")][:count]
