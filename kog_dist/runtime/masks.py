"""Masks of the vocabulary, from who knows what may come (a grammar process, of a prompt the coordinator) to the engines.

They lie in shared memory, one mask per token.

A mask is V bits: bit id % 32 of word id // 32 says whether id may be chosen. Each 64-bit word here carries 32 of them, and the
mask's tag (its epoch modulo 2^32 - 1, plus 1) in its upper half, so that data is its own flag: a reader of any slice (all words
on CPU ranks, a thread block's own slice on a GPU, which maps this memory) knows by itself when its words are there, and no word
of an older mask is ever taken.

Epochs only grow: a request's first mask has the epoch that its request block names, every next token one more. Two slots are used
in turn. A token that was read from the ring was chosen from the offers of all ranks, which have read their masks before that: its
own slot may be written again. Grammars write a mask when the token before it is known.
"""

from __future__ import annotations

from functools import cached_property

from kog_dist.late_numpy import NDArray, np
from kog_dist.runtime.memfd import Segment, round_up

MaskWords = NDArray["np.uint32"]

NUM_SLOTS = 2
_LARGEST_TAG = 0xFFFFFFFF


def num_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


def mask_bytes(vocab_size: int) -> int:
    """Bytes that the slots take in a segment."""
    return round_up(NUM_SLOTS * 8 * num_words(vocab_size))


def tag_of(epoch: int) -> np.uint64:
    """The upper half of an epoch's words; never 0, which stands in slots that nobody has written."""
    return np.uint64(epoch % _LARGEST_TAG + 1)


class MaskSlots:
    """A view of the slots inside `segment`, at `offset` bytes; `close` before the segment is closed."""

    def __init__(self, segment: Segment, offset: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._segment, self._offset = segment, offset

    @cached_property
    def _slots(self) -> NDArray[np.uint64]:
        shape = (NUM_SLOTS, num_words(self.vocab_size))
        return self._segment.array(np.uint64, shape[0] * shape[1], self._offset).reshape(shape)

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes in this process, whole pages."""
        return self._slots.ctypes.data, mask_bytes(self.vocab_size)

    def put(self, epoch: int, mask: MaskWords) -> None:
        """Write the mask (num_words,) of `epoch`, from 1. One process at a time writes; it never waits."""
        self._slots[epoch % NUM_SLOTS] = mask.astype(np.uint64) | tag_of(epoch) << np.uint64(32)

    def get(self, epoch: int) -> MaskWords | None:
        """A copy of the mask of `epoch`, or None when it is not completely there. Never waits."""
        words = self._slots[epoch % NUM_SLOTS].copy()
        if (words >> np.uint64(32) != tag_of(epoch)).any():
            return None
        mask: MaskWords = words.astype(np.uint32)  # keeps the lower halves
        return mask

    def close(self) -> None:
        """Let go of the segment."""
        vars(self).pop("_slots", None)
