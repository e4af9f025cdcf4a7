"""What the ranks of a GPU engine go by in a turn of several requests: rank 0 decides what each might see differently."""

from __future__ import annotations

from kog_dist.records import dataclass
from kog_dist.runtime.abi import MOST_PARALLEL

_MOST_NEW = 1 << 12


@dataclass(frozen=True, slots=True)
class Decision:
    """`num_new`: requests that are taken now. `have_drafts`: those that might share passes have some of their own in turn.
    `may_begin`: a bit for each decode slot whose request waited for its first mask, and does no longer.
    """

    num_new: int = 0
    have_drafts: bool = False
    may_begin: int = 0

    def begins(self, slot: int) -> bool:
        """Whether the request of a decode slot need not wait for its first mask."""
        return bool(self.may_begin >> slot & 1)

    def pack(self) -> int:
        """As a number of a few bits."""
        return min(self.num_new, _MOST_NEW) << (1 + MOST_PARALLEL) | self.may_begin << 1 | self.have_drafts

    @classmethod
    def unpack(cls, number: int) -> Decision:
        """What `pack` has packed."""
        return cls(number >> (1 + MOST_PARALLEL), bool(number & 1), number >> 1 & (1 << MOST_PARALLEL) - 1)
