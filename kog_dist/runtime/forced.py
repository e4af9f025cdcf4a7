"""Tokens that a grammar forces next, from the grammar process to rank 0: drafts that are right.

They lie in shared memory behind the masks. Each 64-bit word has its epoch's tag in its upper half, as those of masks have; the
epoch is that of the first token's mask. One slot is enough: the tokens of an epoch are written when the token before them is
known, and rank 0 reads them before it begins the pass that chooses the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from kog_dist.decode.draft_lengths import MOST
from kog_dist.late_numpy import NDArray, np
from kog_dist.runtime.masks import tag_of
from kog_dist.runtime.memfd import Segment, round_up

MOST_FORCED = MOST - 1  # tokens of a draft
FORCED_BYTES = round_up(8 * (1 + MOST_FORCED))  # that the slot takes in a segment


class ForcedSlot:
    """A view of the slot inside `segment`, at `offset` bytes; `close` before the segment is closed."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment, self._offset = segment, offset

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes in this process, whole pages."""
        return self._words.ctypes.data, FORCED_BYTES

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        return self._segment.array(np.uint64, 1 + MOST_FORCED, self._offset)

    def put(self, epoch: int, token_ids: Sequence[int]) -> None:
        """Say which tokens must come from `epoch` on, as far as it is known; MOST_FORCED count. One process at a time writes."""
        found = token_ids[:MOST_FORCED]
        self._words[: 1 + len(found)] = np.array([len(found), *found], np.uint64) | tag_of(epoch) << np.uint64(32)

    def get(self, epoch: int) -> list[int] | None:
        """What has been said of `epoch`, or None when it is not completely there. Never waits."""
        words = self._words.copy()
        if words[0] >> np.uint64(32) != tag_of(epoch):
            return None
        said = words[: 1 + int(words[0].astype(np.uint32))]
        return None if (said >> np.uint64(32) != tag_of(epoch)).any() else said[1:].astype(np.uint32).tolist()

    def close(self) -> None:
        """Let go of the segment."""
        vars(self).pop("_words", None)
