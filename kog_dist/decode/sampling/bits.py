"""The float32 functions of sampling, in operations that a kernel can repeat bit by bit.

Everything is float32; each written operation is rounded on its own (on CUDA `__fmul_rn`, `__fadd_rn`, `__fdiv_rn`: a fused
multiply-add would give other bits):
    word   = Philox4x32-10(counter = (id >> 2, position, 0, 0), key = (seed low, seed high))[id & 3]
    u      = (float(word >> 9) + 0.5) * 2**-23                     exact, in (0, 1)
    gumbel = -log(-log(u))                                         `log` as in `log32`
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
# Cephes expf: exp(f) = 1 + (f + f**2 * polynomial(f)) for |f| <= ln(2) / 2; highest power first.
_EXP_POLYNOMIAL = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
_LOG2_E = np.float32(1.44269504088896341)
MASS_BITS = 40  # a mass of 2**40 is that of the most likely token; 2**23 of them fit into 63 bits
_LEAST_EXPONENT = np.float32(-28.0)  # exp of it is below 2**-40: its mass, and that of everything below, is 0


def gumbel(seed: int, position: int, first_id: int, count: int) -> NDArray[np.float32]:
    """Noise (count,) of the vocabulary ids from `first_id` on."""
    first_block, last_block = first_id >> 2, (first_id + count + 3) >> 2
    blocks = np.arange(first_block, last_block, dtype=np.uint32)
    words = philox4x32(blocks, position, seed).ravel()[first_id - 4 * first_block :][:count]
    return _gumbel_of_words(words)


def gumbel_of(seed: int, position: int, ids: NDArray[np.integer[Any]]) -> NDArray[np.float32]:
    """Noise (n,) of any vocabulary ids (n,): the same values as `gumbel` gives."""
    words = philox4x32((ids >> 2).astype(np.uint32), position, seed)[np.arange(len(ids)), ids & 3]
    return _gumbel_of_words(words)


def _gumbel_of_words(words: Words) -> NDArray[np.float32]:
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


def masses(distance: NDArray[np.float32]) -> NDArray[np.uint64]:
    """exp(distance) * 2**40, cut off to integers (n,), of float32 distances (n,) that are not above 0; 0 below about -27.7.

    Integers, because their sums do not depend on the order of additions: every reduction tree and every way to cut the
    vocabulary give the same bits, which sums of float32 do not. Relative error of a mass below 2e-7, besides the cut.

    Written order (each step rounded to float32): x = max(distance, -28); n = floor(x * LOG2_E + 0.5); f = x - n * LN2_HIGH;
    f = f - n * LN2_LOW; p by Horner's rule; y = p * (f * f); y = y + f; y = y + 1; mass = integer part of y * 2**(n + 40), exact.
    """
    x = np.maximum(distance, _LEAST_EXPONENT)
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    f = x - n * _LN2_HIGH
    f -= n * _LN2_LOW
    p = np.full_like(f, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p *= f
        p += coefficient
    p *= f * f
    p += f
    p += np.float32(1.0)
    mass: NDArray[np.uint64] = np.ldexp(p, n.astype(np.int32) + MASS_BITS).astype(np.uint64)
    return mass


def log_of_mass(total: int) -> np.float32:
    """Natural logarithm of `total` * 2**-40, for a sum of masses of at least 2**40.

    The sum is rounded once to float32 (to nearest, ties to even), scaled exactly, then `log32`.
    """
    return np.float32(_log32_of(float(np.float32(np.uint64(total)) * np.float32(2.0**-MASS_BITS))))


_FLOAT32 = struct.Struct("f")
_ONE_LOG_POLYNOMIAL = tuple(map(float, _LOG_POLYNOMIAL))
_ONE_LN2_HIGH, _ONE_LN2_LOW, _ONE_SQRT_HALF = float(_LN2_HIGH), float(_LN2_LOW), float(_SQRT_HALF)


def _rounded(x: float) -> float:
    """To float32. Sums and products of two float32 numbers in float64 become what float32 arithmetic gives."""
    (rounded,) = _FLOAT32.unpack(_FLOAT32.pack(x))
    return float(rounded)


def _log32_of(x: float) -> float:
    """`log32` of one number, in a tenth of the time that arrays take: every token with log-probabilities needs it."""
    f, exponent = math.frexp(x)
    if f < _ONE_SQRT_HALF:
        f, exponent = f + f, exponent - 1
    f -= 1.0
    z, p = _rounded(f * f), _ONE_LOG_POLYNOMIAL[0]
    for coefficient in _ONE_LOG_POLYNOMIAL[1:]:
        p = _rounded(_rounded(p * f) + coefficient)
    p = _rounded(_rounded(p * f) * z)
    p = _rounded(p + _rounded(exponent * _ONE_LN2_LOW))
    p = _rounded(p - 0.5 * z)
    return _rounded(_rounded(f + p) + _rounded(exponent * _ONE_LN2_HIGH))
