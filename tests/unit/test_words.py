"""Mailbox words: any payload, integer epochs, no sentinel, no tearing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.collectives import words
from kog_dist.collectives.words import EpochTag

ODD_BITS = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x807FFFFF,  # subnormals
    0x7F800000, 0xFF800000,  # infinities
    0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF,  # NaNs, quiet and signalling, with payloads
    0x3F800000, 0x00800000, 0x7F7FFFFF,
]  # fmt: skip
TAGS = [1, 2, 255, 2**31, 2**32 - 1]


def from_bits(bits: list[int]) -> NDArray[np.float32]:
    return np.array(bits, np.uint32).view(np.float32)


def stripped(packed: words.Words, tag: int) -> words.Words:
    out = np.empty_like(packed)
    words.strip(packed, tag, out)
    return out


@pytest.mark.parametrize("tag", TAGS)
def test_every_bit_pattern_is_data(tag: int) -> None:
    values = from_bits(ODD_BITS)
    found = stripped(words.pack(values, tag), tag)
    assert words.all_tagged(found)
    assert words.payload(found).view(np.uint32).tolist() == ODD_BITS


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.integers(0, 2**32 - 1))
def test_round_trip(bits: list[int], tag: int) -> None:
    packed = words.pack(from_bits(bits), tag)
    assert words.tags(packed).tolist() == [tag] * len(bits)
    assert packed.tolist() == [tag << 32 | b for b in bits]
    found = stripped(packed, tag)
    assert words.all_tagged(found)
    assert words.payload(found).view(np.uint32).tolist() == bits
    assert words.payload(packed).view(np.uint32).tolist() == bits


@given(st.data())
def test_ready_only_when_every_tag_is_right(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 20))
    bits = data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=length, max_size=length))
    tag = data.draw(st.integers(0, 2**32 - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda t: t != tag))
    packed = words.pack(from_bits(bits), tag)
    for place in range(length):
        mixed = packed.copy()
        mixed[place] = other << 32 | bits[place]
        assert not words.all_tagged(stripped(mixed, tag))


def test_fresh_memory_is_not_ready_for_any_epoch() -> None:
    for bits in (8, 32):
        for epoch in (1, 2, (1 << bits) - 1):
            assert not words.all_tagged(stripped(np.zeros(4, np.uint64), EpochTag(bits).of(epoch)))


def test_store_writes_all_words_and_no_others() -> None:
    memory = np.zeros((3, 8), np.uint64)
    packed = words.pack(from_bits(ODD_BITS[:8]), 9)
    words.store(memory[1], packed)
    assert memory[1].tolist() == packed.tolist()
    assert not memory[[0, 2]].any()


@pytest.mark.parametrize("bits", [1, 8, 32])
def test_tags_wrap(bits: int) -> None:
    tag = EpochTag(bits)
    size = 1 << bits
    assert [tag.of(epoch) for epoch in (1, size - 1, size, size + 1, 5 * size + 1)] == [1, size - 1, 0, 1, 1]


def test_impossible_epochs_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 1, got 0"):
        EpochTag().of(0)
    for bits in (0, 33):
        with pytest.raises(ValueError, match="1 to 32"):
            EpochTag(bits)
