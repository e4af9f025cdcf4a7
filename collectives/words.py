"""The 64-bit mailbox word: a float32 in the lower half, the epoch it belongs to in the upper half.

The word is its own flag. It is written and read as one aligned 8-byte value, so a reader that sees the wanted epoch has the
payload that was published with it, without fences and in any order of arrival. Epochs are compared as integers; every payload bit
pattern is data (NaN, -0, subnormals), nothing stands for "empty".

Epochs grow for ever, tags are the lowest `bits` of them. That is safe while a slot is rewritten before 2^bits epochs have passed
and its first epoch is below 2^bits: memory starts as zero, and epochs start at 1. Narrow tags exist to test the wrap-around.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.records import dataclass

WORD_BYTES: Final = 8
TAG_BITS: Final = 32

Words = NDArray[np.uint64]

_TAG_SHIFT = np.uint64(TAG_BITS)
_PAYLOAD_END = np.uint64(1 << TAG_BITS)


@dataclass(frozen=True, slots=True)
class EpochTag:
    """Turns epochs into tags of `bits` bits (1 to 32)."""

    bits: int = TAG_BITS

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= TAG_BITS:
            raise ValueError(f"an epoch tag has 1 to {TAG_BITS} bits, got {self.bits}")

    def of(self, epoch: int) -> int:
        """The tag of an epoch. ValueError below 1: zero is what unwritten memory looks like."""
        if epoch < 1:
            raise ValueError(f"epochs start at 1, got {epoch}")
        return epoch & ((1 << self.bits) - 1)


def pack(values: NDArray[np.float32], tag: int) -> Words:
    """New words with these values, bit by bit, and this tag."""
    packed = values.view(np.uint32).astype(np.uint64)
    packed |= np.uint64(tag << TAG_BITS)
    return packed


def store(row: Words, packed: Words) -> None:
    """Write packed words into `row`, which may be a peer's memory.

    A ufunc (x | x) rather than a copy: its stores are whole words, while memcpy promises nothing about how it moves bytes.
    """
    np.bitwise_or(packed, packed, row)


def strip(rows: Words, tag: int, out: Words) -> None:
    """Take the tag off every word of `rows`, loading each word once. `all_tagged(out)` says whether it was the right one."""
    np.subtract(rows, np.uint64(tag << TAG_BITS), out)


def all_tagged(stripped: Words) -> bool:
    """Whether every word that went through `strip` had the tag: a wrong one leaves a rest in the upper half."""
    return bool(stripped.max() < _PAYLOAD_END)


def payload(stripped: Words) -> NDArray[np.float32]:
    """The values of stripped (or tagged) words: their lower halves, bit by bit. A new array."""
    return stripped.astype(np.uint32).view(np.float32)


def tags(words: Words) -> NDArray[np.uint64]:
    """The tag of every word."""
    return words >> _TAG_SHIFT


def pair_tags(words: Words) -> NDArray[np.uint64]:
    """The tag of every pair word, which only kernels write and take apart otherwise: see device/words.cuh."""
    return (words & np.uint64(0xFF)) | (words >> np.uint64(24)) & np.uint64(0xFF00)
