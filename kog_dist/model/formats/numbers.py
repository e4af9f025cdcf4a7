"""The small numbers that codes of weights stand for: E4M3, INT8 (8 bit), E2M1, INT4 (4 bit), and E8M0, which is for scales.

E4M3 has one sign bit, 4 of exponent (bias 7) and 3 of mantissa, no infinities, and one NaN of each sign (OCP 8-bit floating point
specification, "E4M3"; torch calls it float8_e4m3fn). E2M1 and E8M0 are those of the OCP microscaling (MX) specification.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple

from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.records import dataclass

Codes = NDArray["np.uint8"]
Values = NDArray["np.float32"]


@dataclass(frozen=True)
class Number:
    """`nearest` has the code of every value, ties to even, beyond the ends the last one.

    `largest`: magnitude of the largest value that a scale is chosen for.
    """

    bits: int
    largest: float
    nearest: Callable[[Values], Codes]
    table: Callable[[], Values]

    @cached_property
    def values(self) -> Values:
        """The exact value of every code."""
        return self.table()


class _Float(NamedTuple):
    """A floating-point number with a sign bit, without infinities. `least`: the exponent of its smallest normal value."""

    mantissa_bits: int
    least: int
    largest: float
    sign: int

    def value(self, code: int) -> float:
        """The definition."""
        sign = -1.0 if code & self.sign else 1.0
        exponent, mantissa = divmod(code & (self.sign - 1), 1 << self.mantissa_bits)
        fraction = mantissa / (1 << self.mantissa_bits)
        return sign * (2.0**self.least * fraction if exponent == 0 else 2.0 ** (exponent - 1 + self.least) * (1 + fraction))

    def nearest(self, values: Values) -> Codes:
        """See `Number`."""
        codes = np.empty(values.shape, np.uint8)
        flat, out = np.ascontiguousarray(values, np.float32).reshape(-1), codes.reshape(-1)
        for first in range(0, flat.size, _CHUNK):
            self.write_nearest(flat[first : first + _CHUNK], out[first : first + _CHUNK])
        return codes

    def write_nearest(self, values: Any, codes: Any) -> None:
        """The same, into an array; numpy or cupy arrays."""
        magnitudes = np.minimum(np.abs(values), np.float32(self.largest))
        bits, dropped = magnitudes.view(np.uint32), 23 - self.mantissa_bits
        # Exponent and mantissa of float32, rounded to fewer bits; a carry goes into the exponent, as it should.
        rounded = bits >> np.uint32(dropped)
        rounded &= np.uint32(1)
        rounded += bits
        rounded += np.uint32((1 << dropped - 1) - 1)
        rounded >>= np.uint32(dropped)
        rounded -= np.uint32(127 + self.least - 1 << self.mantissa_bits)
        # Of subnormal numbers the sum with a power of two whose last bit is their unit has the code in its last bits.
        base = np.float32(2.0 ** (self.least - self.mantissa_bits + 23))
        subnormal = (magnitudes + base).view(np.uint32) - base.view(np.uint32)
        codes[...] = np.where(magnitudes < np.float32(2.0**self.least), subnormal, rounded)
        codes[np.signbit(values)] |= np.uint8(self.sign)


E4M3: Final = _Float(3, -6, 448.0, 0x80)
_E2M1: Final = _Float(1, 0, 6.0, 0x08)
_CHUNK: Final = 1 << 14  # values that are rounded at a time: they and what is made of them stay in a core's cache
INT4_ZERO: Final = 8  # the code of 0, where a matrix has no zero points


def _integers(bits: int) -> Number:
    """Those with a sign; the code of 0 is the one in the middle."""
    zero = 1 << bits - 1

    def nearest(values: Any) -> Any:  # of numpy or cupy arrays
        return (np.clip(np.rint(values), 1 - zero, zero - 1) + zero).astype(np.uint8)  # the least is left out: as far down as up

    return Number(bits, float(zero - 1), nearest, lambda: np.arange(-zero, zero, dtype=np.float32))


def _table(form: _Float) -> Values:
    return np.array([form.value(code) for code in range(2 * form.sign)], np.float32)


def _e4m3_values() -> Values:
    values = _table(E4M3)
    values[[0x7F, 0xFF]] = np.nan
    return values


@functools.cache
def _e8m0_values() -> Values:
    return np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], np.float32)


NUMBERS: Final[Mapping[str, Number]] = {
    "E4M3": Number(8, E4M3.largest, E4M3.nearest, _e4m3_values),
    "E2M1": Number(4, _E2M1.largest, _E2M1.nearest, functools.partial(_table, _E2M1)),
    "INT4": _integers(4),
    "INT8": _integers(8),
}


def e8m0_values(codes: Array) -> Values:
    """Powers of two, 2 ** (code - 127); code 255 is NaN."""
    values: Values = _e8m0_values()[codes]
    return values


def nibbles(raw: NDArray[np.uint8]) -> Codes:
    """The 4-bit codes (..., 2n) of bytes (..., n): the lower half of a byte comes first."""
    codes = np.empty((*raw.shape[:-1], raw.shape[-1], 2), np.uint8)
    np.bitwise_and(raw, 15, out=codes[..., 0])
    np.right_shift(raw, 4, out=codes[..., 1])
    return codes.reshape(*raw.shape[:-1], -1)
