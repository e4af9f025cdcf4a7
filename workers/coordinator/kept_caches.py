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

A state that every token changes (`is_recurrent`) has only its end, and copies behind some beginnings (kept_states.py): a request
goes on behind all that was written, behind one of these, or anew.

Where the ranks have a block pool (kept_blocks.py), what a cache holds at the end of an answer is copied there, and a request gets
from there what no cache has.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import field

from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.records import dataclass
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.coordinator import kept_states
from kog_dist.workers.coordinator.kept_blocks import KeptBlocks, num_common
from kog_dist.workers.coordinator.kept_states import KeptStates

_WORTH = 32  # tokens more that blocks have, to be copied from there


@dataclass(slots=True)
class _Kept:
    """One KV cache. `num_written`: positions that were ever written since it began at 0; more than `tokens` after a step back."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    scope: str = ""
    num_prompt: int = 0  # of the tokens
    num_written: int = 0
    last_used: int = 0  # 0: never


class KeptCaches:
    """The books of all KV caches. `window`: of the model's windowed layers, None if it has none.

    `ring_positions`: that these keep; 0: there are none, or they keep all.
    One request runs at a time, between `take` and `give_back`. `blocks`: those of the block pool; None without one. `states`:
    copies of states there, none of a model that has none.
    """

    def __init__(self, layout: KvLayout, window: int | None, *, is_recurrent: bool = False) -> None:
        self._is_recurrent = is_recurrent
        self._kept = [_Kept() for _ in range(layout.num_caches)]
        self.ring_positions = layout.ring_positions if window is not None else 0
        self._window = window or 0
        self._uses = 0
        self._running = KvUse()
        self._scope = ""  # of the running request
        self._num_inherited = 0  # positions ever written in the cache that the running request goes on in
        self._num_prompt = 0  # tokens of the running request's prompt
        self._places: list[tuple[int, int]] = []  # where the running request's state is copied, and the slots
        self._stems: tuple[int, ...] = ()  # which of its beginnings others go on behind
        self.blocks = KeptBlocks(layout.block_tokens, layout.num_slots, layout.num_host_slots) if layout.block_tokens else None
        self.states = KeptStates(layout.num_states if is_recurrent else 0)

    def take(self, prompt: Sequence[int], *, reuse: bool, scope: str = "", num_answer: int = 0) -> KvUse:
        """Where a request runs and what it can use; what else that cache held is lost. What other scopes have left is nobody's.

        Of a model with a state also where copies of it are to be made; the answer has `num_answer` tokens at most.

        A sequence of which less than half would be left is copied, not cut: its conversation may go on. In a block pool it is
        anyway.
        """
        self._scope = scope
        if not self._kept:
            return KvUse()
        oldest = min(range(len(self._kept)), key=lambda idx: self._kept[idx].last_used)
        use = KvUse(oldest, oldest, 0)
        wanted = (prompt if isinstance(prompt, array) else array("I", prompt))[:-1]
        common = [num_common(kept.tokens, wanted) if kept.scope == scope else 0 for kept in self._kept]
        copies = self.states.find(scope, wanted) if self.states.num_slots else {}
        if reuse:
            lengths = [self._usable(*pair, copies) for pair in zip(self._kept, common, strict=True)]
            source = max(range(len(lengths)), key=lambda idx: (lengths[idx], -len(self._kept[idx].tokens)))
            if num_cached := lengths[source]:
                others = [idx for idx in range(len(self._kept)) if idx != source]
                is_small_part = 2 * num_cached < len(self._kept[source].tokens)
                cache = min(others, key=lambda idx: self._kept[idx].last_used) if is_small_part and others else source
                use = KvUse(cache, source, num_cached)
            use = self._with_blocks(use, wanted, copies)
        if self._is_recurrent:
            branch = max(*common, self.blocks.match(scope, wanted)[0] if self.blocks is not None else 0)
            step = kept_states.STEP  # what is shorter is soon read anew; and who leaves a prompt near its end goes on with it
            left = [num for kept, num in zip(self._kept, common, strict=True) if step <= num <= kept.num_prompt - step]
            second, last = kept_states.of_messages(wanted)
            self._num_prompt, self._stems = len(wanted), tuple(at for at in (second, max(left, default=0)) if at)
            is_near = any(branch - _WORTH <= at <= branch for at in copies)
            use = self._with_states(use, len(wanted), num_answer, (last, *self._stems, 0 if is_near else branch), copies)
        self._num_inherited = self._kept[use.source].num_written if use.num_cached and not self._is_recurrent else 0
        self._uses += 1
        for idx in (use.source, use.cache):
            self._kept[idx].last_used = self._uses
        self._running = use
        return use

    def _with_blocks(self, use: KvUse, wanted: array[int], copies: dict[int, int]) -> KvUse:
        """The same with what the block pool has of the prompt, where that is more."""
        if self.blocks is None:
            return use
        num_kept, path = self.blocks.match(self._scope, wanted)
        if self._is_recurrent:
            num_kept = max((at for at in copies if at <= num_kept), default=0)
            path = path[: -(-num_kept // self.blocks.block_tokens)]
        if num_kept < use.num_cached + _WORTH:
            return use
        stays = use.num_cached if use.cache == use.source else 0
        return KvUse(use.cache, use.cache, num_kept, self.blocks.load(path, stays // self.blocks.block_tokens))

    def _with_states(self, use: KvUse, prompt_end: int, num_answer: int, parts: Sequence[int], copies: dict[int, int]) -> KvUse:
        """The same with the copy of a state that it goes on behind, unless that is the state of the cache, and those to be made.

        The prompt has `prompt_end` tokens but for its last; `parts`: see `KeptStates.places`.
        """
        is_live = not use.copies and use.num_cached == self._kept[use.source].num_written
        slot = copies[use.num_cached] if use.num_cached and not is_live else None
        loads: tuple[KvCopy, ...] = ()
        if slot is not None:
            loads = (KvCopy(KvCopyKind.LOAD_STATE, slot, use.num_cached),)
        self.states.use(copies, slot, self._stems)
        places = self.states.places(use.num_cached, prompt_end, num_answer, parts, copies, slot)
        self._places = places
        saves = tuple(KvCopy(KvCopyKind.SAVE_STATE, slot, position) for position, slot in places)
        return KvUse(use.cache, use.source, use.num_cached, (*use.copies, *loads, *saves))

    def _usable(self, kept: _Kept, common: int, copies: dict[int, int]) -> int:
        """Positions of a cache that the prompt, which begins with `common` of them, can go on behind."""
        if self._is_recurrent:
            return max((at for at in (kept.num_written, *copies) if at <= common), default=0)
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
            kept.num_prompt, kept.num_written = min(self._num_prompt, num_positions), max(num_written, self._num_inherited)
            places = [place for place in self._places if place[0] <= num_positions]
            self.states.made(self._scope, kept.tokens, places, self._stems)
            self._places = []

    def save(self) -> KvUse | None:
        """What is to be copied to the block pool of the cache that the last request ran in; None if nothing is."""
        if not self._kept:
            return None
        cache = self._running.cache
        tokens, copies = self._kept[cache].tokens, tuple[KvCopy, ...]()
        if self.blocks is not None:
            copies = self.blocks.save(self._scope, tokens)
            if (slot := self.states.end(self._scope, tokens)) is not None:
                copies += (KvCopy(KvCopyKind.SAVE_STATE, slot, len(tokens)),)
        return KvUse(cache, cache, 0, copies) if copies else None

    def forget(self) -> None:
        """Nothing is kept any more: a device may have cleared all its caches."""
        for kept in self._kept:
            kept.tokens, kept.num_written, kept.last_used = array("I"), 0, 0
        self.states.clear()
        if self.blocks is not None:
            self.blocks.clear()
