"""Where mailboxes lie in the symmetric heap: the same on every rank, and the same for CPU and CUDA heaps."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.words import WORD_BYTES
from kog_dist.errors import PlanError
from kog_dist.records import dataclass
from kog_dist.runtime.abi import LINE_BYTES

_LINE_WORDS = LINE_BYTES // WORD_BYTES


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A placed mailbox: slot s is `world_size` rows, one per source rank, that start on cache lines. Units are 64-bit words."""

    spec: MailboxSpec
    index: int
    first_word: int
    row_words: int
    world_size: int

    def row(self, slot: int, source: int) -> int:
        """First word of the row that `source` writes."""
        return self.first_word + (slot * self.world_size + source) * self.row_words

    def check(self, slot: int, values: NDArray[np.generic]) -> None:
        """ValueError or IndexError for a vector or a slot that this mailbox does not have."""
        num_vectors, rest = divmod(values.size, self.spec.length)
        is_whole = values.ndim == 1 and rest == 0 and 1 <= num_vectors <= self.spec.most
        if not is_whole or values.dtype != np.float32 or not values.flags.c_contiguous:
            at_once = f", {self.spec.most} at most," if self.spec.most > 1 else ""
            raise ValueError(
                f"mailbox {self.spec.name!r} carries contiguous float32 vectors{at_once} of {self.spec.length} values, "
                f"got {values.dtype} of shape {values.shape}"
            )
        if not 0 <= slot < self.spec.num_slots:
            raise IndexError(f"mailbox {self.spec.name!r} has {self.spec.num_slots} slots, got slot {slot}")

    @property
    def num_words(self) -> int:
        """Words of all slots."""
        return self.spec.num_slots * self.world_size * self.row_words


def place(mailboxes: Sequence[MailboxSpec], world_size: int) -> list[Mailbox]:
    """Place the mailboxes one after the other from word 0. PlanError for a name that is used twice or a size below 1."""
    placed: list[Mailbox] = []
    first_word = 0
    names: set[str] = set()
    for index, spec in enumerate(mailboxes):
        if spec.name in names or min(spec.num_slots, spec.length, spec.most) < 1:
            raise PlanError(f"mailbox {spec} is declared twice or is empty")
        names.add(spec.name)
        row_words = -(-spec.length * spec.most // _LINE_WORDS) * _LINE_WORDS
        placed.append(Mailbox(spec, index, first_word, row_words, world_size))
        first_word += placed[-1].num_words
    return placed


# What every communicator's barrier uses; declared behind the others. 2d + 2 slots at delay 0.
BARRIER = MailboxSpec("barrier", num_slots=2, length=1)


def fingerprint(mailboxes: Sequence[MailboxSpec], world_size: int, epoch_bits: int) -> bytes:
    """32 bytes that are equal on two ranks only when they lay the heap out alike."""
    text = repr((world_size, epoch_bits, [(spec.name, spec.num_slots, spec.length, spec.most) for spec in mailboxes]))
    return hashlib.sha256(text.encode()).digest()
