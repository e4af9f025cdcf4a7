"""What the KV caches of the ranks hold, and which of it a request can use. All ranks obey; nobody else decides.

A kept sequence is a list of tokens whose keys and values stand at the positions from 0 on. A request uses the longest beginning
that it has in common with one, but never the whole prompt: the last token is decoded again, for its logits.

A windowed layer may keep its positions in a ring of R (`KvLayout.ring_positions`), where position p takes the place of p - R.
Then old positions are gone for good, also when the sequence is cut back later. With H positions ever written, those from H - R on
are intact. Going on at position n reads the positions from n - W + 1 on (W: the window), and what is overwritten from there on
lies outside of the window by then. So the first n positions can be used exactly if

    H <= R  or  n - W + 1 >= H - R

and if they cannot, no shorter beginning can. Once the ring is full, a step back may have R - W + 1 positions: a kernel whose ring
is just the window can go on behind the very end and one position before it, and nowhere else. Whatever was decoded after a stop
string before the ranks knew of it has to be stepped back over, so a ring should be some tens of positions longer than the window.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kog_dist.decode.request import KvUse
from kog_dist.runtime.control import KvLayout


@dataclass(slots=True)
class _Kept:
    """One KV cache. `num_written`: positions that were ever written since it began at 0; more than `tokens` after a step back."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    num_written: int = 0
    last_used: int = 0  # 0: never


class KeptCaches:
    """The books of all KV caches. `window`: of the model's windowed layers, None if it has none.

    One request runs at a time, between `take` and `give_back`.
    """

    def __init__(self, layout: KvLayout, window: int | None) -> None:
        self._kept = [_Kept() for _ in range(layout.num_caches)]
        self._ring = layout.ring_positions if window is not None else 0
        self._window = window or 0
        self._uses = 0
        self._running = KvUse()
        self._num_inherited = 0  # positions ever written in the cache that the running request goes on in

    def take(self, prompt: Sequence[int], *, reuse: bool) -> KvUse:
        """Where a request runs and what it can use; what else that cache held is lost.

        A sequence of which less than half would be left is copied, not cut: its conversation may go on.
        """
        if not self._kept:
            return KvUse()
        oldest = min(range(len(self._kept)), key=lambda idx: self._kept[idx].last_used)
        use = KvUse(oldest, oldest, 0)
        if reuse:
            wanted = prompt if isinstance(prompt, array) else array("I", prompt)
            lengths = [self._usable(kept, wanted) for kept in self._kept]
            source = max(range(len(lengths)), key=lambda idx: (lengths[idx], -len(self._kept[idx].tokens)))
            if num_cached := lengths[source]:
                others = [idx for idx in range(len(self._kept)) if idx != source]
                is_small_part = 2 * num_cached < len(self._kept[source].tokens)
                cache = min(others, key=lambda idx: self._kept[idx].last_used) if is_small_part and others else source
                use = KvUse(cache, source, num_cached)
        self._num_inherited = self._kept[use.source].num_written if use.num_cached else 0
        self._uses += 1
        for idx in (use.source, use.cache):
            self._kept[idx].last_used = self._uses
        self._running = use
        return use

    def _usable(self, kept: _Kept, wanted: array[int]) -> int:
        """Positions of a cache that the prompt can go on behind."""
        num_common = _num_common(kept.tokens, wanted[:-1])
        return num_common if self.is_intact(num_common, kept.num_written) else 0

    def is_intact(self, num_positions: int, num_written: int) -> bool:
        """Whether the first `num_positions` can be used after `num_written` were written; see the top of this file."""
        if not self._ring or num_written <= self._ring:
            return True
        return num_positions - self._window + 1 >= num_written - self._ring

    def give_back(self, tokens: Sequence[int], num_positions: int, num_written: int) -> None:
        """The request has ended: its cache holds the first `num_positions` of `tokens`; it wrote below `num_written`."""
        if self._kept:
            kept = self._kept[self._running.cache]
            kept.tokens = array("I", tokens[:num_positions])
            kept.num_written = max(num_written, self._num_inherited)

    def forget(self) -> None:
        """Nothing is kept any more: a device may have cleared all its caches."""
        for kept in self._kept:
            kept.tokens, kept.num_written, kept.last_used = array("I"), 0, 0


def _num_common(left: array[int], right: array[int]) -> int:
    """How many ids both begin with."""
    most = min(len(left), len(right))
    left, right = left[:most], right[:most]
    if left == right:
        return most  # a conversation goes on: so it is mostly
    return int(np.flatnonzero(np.frombuffer(left, np.uint32) != np.frombuffer(right, np.uint32))[0])
