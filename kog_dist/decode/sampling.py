"""How a token is chosen from logits: the definition for every engine, in operations that a kernel can repeat bit by bit.

Greedy takes the largest logit. With a temperature T the token is the largest `logit * (1 / T) + gumbel` (the Gumbel-max trick:
this draws from softmax(logits / T)), where `gumbel` depends only on (seed, position, vocabulary id). Ties go to the lower id.
So the choice can be made slice by slice, in any order and on any number of ranks, with the same result.

Bits are part of the definition. Everything is float32; each written operation is rounded on its own (on CUDA `__fmul_rn`,
`__fadd_rn`, `__fdiv_rn`: a fused multiply-add would give other bits):
    word   = Philox4x32-10(counter = (id >> 2, position, 0, 0), key = (seed low, seed high))[id & 3]
    u      = (float(word >> 9) + 0.5) * 2**-23                     exact, in (0, 1)
    gumbel = -log(-log(u))                                         `log` as written below
    score  = logit * (1 / T) + gumbel
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kog_dist.rpc.fields import check_temperature

Words = NDArray[np.uint32]

_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_LOW_WORD, _HIGH_SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
# Cephes logf: log(1 + f) = f - f**2 / 2 + f**3 * polynomial(f) for 1 + f in [sqrt(1/2), sqrt(2)); highest power first.
_LOG_POLYNOMIAL = tuple(
    np.float32(c)
    for c in (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
              -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2; the first has few bits
_SQRT_HALF = np.float32(0.70710678)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose: temperature 0 is greedy; the seed matters only above 0. Raises ValueError for values out of range."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be between 0 and 2**64 - 1, got {self.seed}")


class Candidate(NamedTuple):
    """Best token of some slice of the vocabulary. `value` is NaN if any logit of the slice was not finite."""

    value: float
    token_id: int


NO_CANDIDATE = Candidate(-math.inf, 0)  # of an empty slice


def candidate(
    logits_slice: NDArray[Any], first_id: int, position: int, sampling: Sampling, noise: NDArray[np.float32] | None = None
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
    if sampling.temperature > 0:
        inverse = np.float32(1.0) / np.float32(sampling.temperature)
        scores = logits_slice.astype(np.float32, copy=False) * inverse
        scores += gumbel(sampling.seed, position, first_id, len(scores)) if noise is None else noise
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


def sample(logits: NDArray[Any], position: int, sampling: Sampling) -> int:
    """The token chosen from all logits (vocab,). Raises ValueError if any is not finite."""
    best = candidate(logits, 0, position, sampling)
    if math.isnan(best.value):
        raise ValueError(f"logits of position {position} are not all finite; no token can be chosen from them")
    return best.token_id


def gumbel(seed: int, position: int, first_id: int, count: int) -> NDArray[np.float32]:
    """Noise (count,) of the vocabulary ids from `first_id` on."""
    first_block, last_block = first_id >> 2, (first_id + count + 3) >> 2
    blocks = np.arange(first_block, last_block, dtype=np.uint32)
    words = philox4x32(blocks, position, seed).ravel()[first_id - 4 * first_block :][:count]
    uniform = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -log32(-log32(uniform))


def philox4x32(blocks: Words, position: int, seed: int) -> Words:
    """Philox4x32-10 of the counters (block, position, 0, 0) under the key (seed low, seed high): (len(blocks), 4)."""
    return philox4x32_counters((blocks, np.uint32(position), np.uint32(0), np.uint32(0)), seed & 0xFFFFFFFF, seed >> 32)


def philox4x32_counters(counter: tuple[Any, Any, Any, Any], key_low: int, key_high: int) -> Words:
    """Philox4x32-10 (Salmon et al., SC 2011) of counters whose four words broadcast to one shape (n,): (n, 4)."""
    c0, c1, c2, c3 = (np.asarray(word, np.uint64) for word in counter)
    for _ in range(_PHILOX_ROUNDS):
        product0, product1 = c0 * _PHILOX_MULTIPLIERS[0], c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HIGH_SHIFT) ^ c1 ^ np.uint64(key_low),
            product1 & _LOW_WORD,
            (product0 >> _HIGH_SHIFT) ^ c3 ^ np.uint64(key_high),
            product0 & _LOW_WORD,
        )
        key_low, key_high = (key_low + _PHILOX_WEYL[0]) & 0xFFFFFFFF, (key_high + _PHILOX_WEYL[1]) & 0xFFFFFFFF
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def log32(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithm (n,) of positive normal float32 values from +, -, * and the exponent bits; relative error below 1e-7.

    Written order (each step rounded to float32): split x = m * 2**e with m in [1/2, 1); if m < sqrt(1/2): m = m + m, e = e - 1;
    f = m - 1; z = f * f; p by Horner's rule; y = (p * f) * z; y = y + e * LN2_LOW; y = y - 0.5 * z; f + y + e * LN2_HIGH.
    """
    bits = x.view(np.uint32)
    exponent = (bits >> np.uint32(23)).astype(np.int32) - 126
    mantissa = ((bits & np.uint32(0x007FFFFF)) | np.uint32(0x3F000000)).view(np.float32)
    low = mantissa < _SQRT_HALF
    f = np.where(low, mantissa + mantissa, mantissa) - np.float32(1.0)
    e = (exponent - low).astype(np.float32)
    z = f * f
    p = np.full_like(f, _LOG_POLYNOMIAL[0])
    for coefficient in _LOG_POLYNOMIAL[1:]:
        p *= f
        p += coefficient
    p *= f
    p *= z
    p += e * _LN2_LOW
    z *= np.float32(0.5)
    p -= z
    f += p
    e *= _LN2_HIGH
    f += e
    result: NDArray[np.float32] = f
    return result
