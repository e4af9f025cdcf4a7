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

A state that every token changes (`is_recurrent`) has only its end, and copies at some positions that ranks make by the rule of
`kept_states.py`: a request goes on behind all that was written, behind one of these, or anew.

Where the ranks have a block pool (kept_blocks.py), what a cache holds at the end of an answer is copied there, and a request gets
from there what no cache has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import field

from kog_dist.decode.kept_states import copies_of, still_there
from kog_dist.decode.request import KvCopy, KvUse
from kog_dist.records import dataclass
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.kept_blocks import KeptBlocks, num_common

_WORTH = 32  # tokens more that blocks have, to be copied from there


@dataclass(slots=True)
class _Kept:
    """One KV cache. `num_written`: positions that were ever written since it began at 0; more than `tokens` after a step back."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    scope: str = ""
    num_written: int = 0
    last_used: int = 0  # 0: never
    copies: dict[int, int] = field(default_factory=dict)  # positions of those of its state, by their number


class KeptCaches:
    """The books of all KV caches. `window`: of the model's windowed layers, None if it has none.

    `ring_positions`: that these keep; 0: there are none, or they keep all.
    One request runs at a time, between `take` and `give_back`. `blocks`: those of the block pool; None without one.
    """

    def __init__(self, layout: KvLayout, window: int | None, *, is_recurrent: bool = False) -> None:
        self._is_recurrent = is_recurrent
        self._kept = [_Kept() for _ in range(layout.num_caches)]
        self.ring_positions = layout.ring_positions if window is not None else 0
        self._window = window or 0
        self._uses = 0
        self._running = KvUse()
        self._scope = ""  # of the running request
        self._num_prompt = 1  # tokens of the running request's
        self._num_inherited = 0  # positions ever written in the cache that the running request goes on in
        self.blocks = KeptBlocks(layout.block_tokens, layout.num_slots, layout.num_host_slots) if layout.block_tokens else None

    def take(self, prompt: Sequence[int], *, reuse: bool, scope: str = "") -> KvUse:
        """Where a request runs and what it can use; what else that cache held is lost. What other scopes have left is nobody's.

        A sequence of which less than half would be left is copied, not cut: its conversation may go on. In a block pool it is
        anyway.
        """
        self._scope = scope
        if not self._kept:
            return KvUse()
        oldest = min(range(len(self._kept)), key=lambda idx: self._kept[idx].last_used)
        use = KvUse(oldest, oldest, 0)
        if reuse:
            wanted = prompt if isinstance(prompt, array) else array("I", prompt)
            lengths = [self._usable(kept, wanted, scope) for kept in self._kept]
            source = max(range(len(lengths)), key=lambda idx: (lengths[idx], -len(self._kept[idx].tokens)))
            if num_cached := lengths[source]:
                others = [idx for idx in range(len(self._kept)) if idx != source]
                is_small_part = 2 * num_cached < len(self._kept[source].tokens)
                cache = min(others, key=lambda idx: self._kept[idx].last_used) if is_small_part and others else source
                use = KvUse(cache, source, num_cached)
            use = self._with_blocks(use, wanted)
        self._num_inherited = self._kept[use.source].num_written if use.num_cached and not self._is_recurrent else 0
        copies = still_there(self._kept[use.source].copies, use.num_cached) if use.cache == use.source else {}
        self._kept[use.cache].copies = copies
        self._num_prompt = len(prompt)
        self._uses += 1
        for idx in (use.source, use.cache):
            self._kept[idx].last_used = self._uses
        self._running = use
        return use

    def _with_blocks(self, use: KvUse, wanted: array[int]) -> KvUse:
        """The same with what the block pool has of the prompt, where that is more."""
        if self.blocks is None:
            return use
        num_kept, path = self.blocks.match(self._scope, wanted[:-1])
        if num_kept < use.num_cached + _WORTH:
            return use
        stays = use.num_cached if use.cache == use.source else 0
        return KvUse(use.cache, use.cache, num_kept, self.blocks.load(path, stays // self.blocks.block_tokens))

    def _usable(self, kept: _Kept, wanted: array[int], scope: str) -> int:
        """Positions of a cache that the prompt can go on behind."""
        if kept.scope != scope:
            return 0
        common = num_common(kept.tokens, wanted[:-1])
        if self._is_recurrent:
            return max((at for at in (kept.num_written, *kept.copies.values()) if at <= common), default=0)
        return common if self.is_intact(common, kept.num_written) else 0

    def is_intact(self, num_positions: int, num_written: int) -> bool:
        """Whether the first `num_positions` can be used after `num_written` were written; see the top of this file."""
        if not self.ring_positions or num_written <= self.ring_positions:
            return True
        return num_positions - self._window + 1 >= num_written - self.ring_positions

    def give_back(self, tokens: Sequence[int], num_positions: int, num_written: int) -> None:
        """The request has ended: its cache holds the first `num_positions` of `tokens`; it wrote below `num_written`."""
        if self._kept:
            kept = self._kept[self._running.cache]
            kept.tokens, kept.scope = array("I", tokens[:num_positions]), self._scope
            kept.num_written = max(num_written, self._num_inherited)
            if self._is_recurrent:
                # A copy is made when a prompt has been read so far, but not by a request that was cancelled just then.
                made = copies_of(self._running.num_cached, self._num_prompt)
                kept.copies |= {number: at for number, at in made.items() if at < num_positions}

    def save(self) -> KvUse | None:
        """What is to be copied to the block pool of the cache that the last request ran in; None if nothing is."""
        if self.blocks is None or not self._kept:
            return None
        cache = self._running.cache
        copies: tuple[KvCopy, ...] = self.blocks.save(self._scope, self._kept[cache].tokens)
        return KvUse(cache, cache, 0, copies) if copies else None

    def forget(self) -> None:
        """Nothing is kept any more: a device may have cleared all its caches."""
        for kept in self._kept:
            kept.tokens, kept.num_written, kept.last_used, kept.copies = array("I"), 0, 0, {}
        if self.blocks is not None:
            self.blocks.clear()
