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
goes on behind all that was written, behind one of these, or anew. What ended within a prompt, or with it, counts where copies of
it might be (`KeptStates.strided`); behind that tokens were decoded one by one, and it counts anywhere.

Requests that run together have a cache each. What a running one holds so far others may copy, and go on behind the copy, but
for its state, which moves on: only behind copies of it that were made by then.

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
    goes_on: bool = True  # of a state: whether requests go on behind its end


@dataclass(slots=True)
class _Run:
    """A request between `take` and `give_back`."""

    use: KvUse
    scope: str
    num_prompt: int = 0  # tokens of its prompt
    num_inherited: int = 0  # positions ever written in the cache that it goes on in
    places: list[tuple[int, int]] = field(default_factory=list)  # where its state will be copied, and the slots, reserved
    stems: tuple[int, ...] = ()  # which of its beginnings others go on behind


class KeptCaches:
    """The books of all KV caches. `window`: of the model's windowed layers, None if it has none.

    `ring_positions`: that these keep; 0: there are none, or they keep all.
    There is a cache at least for each request that runs, between `take` and `give_back` or `forget`: `parallel` at most.
    `blocks`: those of the block pool; None without one. `states`:
    copies of states there, none of a model that has none.
    """

    def __init__(self, layout: KvLayout, window: int | None, *, is_recurrent: bool = False, parallel: int = 1) -> None:
        self._is_recurrent, self._parallel = is_recurrent, parallel
        self._kept = [_Kept() for _ in range(layout.num_caches)]
        self.ring_positions = layout.ring_positions if window is not None else 0
        self._window = window or 0
        self._uses = 0
        self._running: dict[int, _Run] = {}  # by KV cache
        self.blocks = KeptBlocks(layout.block_tokens, layout.num_slots, layout.num_host_slots) if layout.block_tokens else None
        states = (layout.num_states, layout.state_stride, layout.num_host_states) if is_recurrent else (0,)
        self.states = KeptStates(*states)

    def take(self, prompt: Sequence[int], *, reuse: bool, scope: str = "", num_answer: int = 0) -> KvUse:
        """Where a request runs and what it can use; what else that cache held is lost. What other scopes have left is nobody's.

        Of a model with a state also where copies of it are to be made; the answer has `num_answer` tokens at most.

        A sequence of which less than half would be left is copied, not cut: its conversation may go on. In a block pool it is
        anyway.
        """
        if not self._kept:
            return KvUse()
        free = [idx for idx in range(len(self._kept)) if idx not in self._running]
        assert free, "a request that runs has a cache"
        oldest = min(free, key=lambda idx: self._kept[idx].last_used)
        run = _Run(KvUse(oldest, oldest, 0), scope)
        wanted = (prompt if isinstance(prompt, array) else array("I", prompt))[:-1]
        common = [num_common(kept.tokens, wanted) if kept.scope == scope else 0 for kept in self._kept]
        copies = self.states.find(scope, wanted) if self.states.num_slots else {}
        if reuse:
            lengths = [self._usable(idx, num, copies) for idx, num in enumerate(common)]
            source = max(range(len(lengths)), key=lambda idx: (lengths[idx], idx in free, -len(self._kept[idx].tokens)))
            if num_cached := lengths[source]:
                others = [idx for idx in free if idx != source]
                is_copied = source not in free or (2 * num_cached < len(self._kept[source].tokens) and bool(others))
                cache = min(others, key=lambda idx: self._kept[idx].last_used) if is_copied else source
                run.use = KvUse(cache, source, num_cached)
            run.use = self._with_blocks(run, wanted, copies)
        if self._is_recurrent:
            branch = max(*common, self.blocks.match(scope, wanted)[0] if self.blocks is not None else 0)
            step = kept_states.STEP  # what is shorter is soon read anew; and who leaves a prompt near its end goes on with it
            left = [num for kept, num in zip(self._kept, common, strict=True) if step <= num <= kept.num_prompt - step]
            second, last = kept_states.of_messages(wanted)
            stems = (self.states.strided(at, run.use.num_cached) for at in (second, max(left, default=0)) if at)
            run.num_prompt, run.stems = len(wanted), tuple(stems)
            is_near = any(branch - _WORTH <= at <= branch for at in copies)
            parts = (last, *run.stems, 0 if is_near else branch)
            run.use = self._with_states(run, len(wanted), num_answer, parts, copies)
        use = run.use
        run.num_inherited = self._kept[use.source].num_written if use.num_cached and not self._is_recurrent else 0
        self._uses += 1
        for idx in (use.source, use.cache):
            self._kept[idx].last_used = self._uses
        self._running[use.cache] = run
        return use

    def _with_blocks(self, run: _Run, wanted: array[int], copies: dict[int, int]) -> KvUse:
        """Its use with what the block pool has of the prompt, where that is more."""
        use = run.use
        if self.blocks is None:
            return use
        num_kept, path = self.blocks.match(run.scope, wanted)
        if self._is_recurrent:
            num_kept = max((at for at in copies if at <= num_kept), default=0)
            path = path[: -(-num_kept // self.blocks.block_tokens)]
        if num_kept < use.num_cached + _WORTH:
            return use
        stays = use.num_cached if use.cache == use.source else 0
        return KvUse(use.cache, use.cache, num_kept, self.blocks.load(path, stays // self.blocks.block_tokens))

    def _with_states(self, run: _Run, prompt_end: int, num_answer: int, parts: Sequence[int], copies: dict[int, int]) -> KvUse:
        """Its use with the copy of a state that it goes on behind, unless that is the state of the cache, and those to be made.

        The prompt has `prompt_end` tokens but for its last; `parts`: see `KeptStates.places`.
        """
        use = run.use
        is_live = not use.copies and use.num_cached in self._own(use.source)
        slot = copies[use.num_cached] if use.num_cached and not is_live else None
        loads: tuple[KvCopy, ...] = ()
        if slot is not None:
            loads = (KvCopy(KvCopyKind.LOAD_STATE, slot, use.num_cached),)
        self.states.use(copies, slot, run.stems)
        shares = len(self._running) + 1 < self._parallel
        run.places = self.states.places(use.num_cached, prompt_end, num_answer, parts, copies, slot, shares=shares)
        self.states.reserve(slot for _, slot in run.places)
        saves = tuple(KvCopy(KvCopyKind.SAVE_STATE, slot, position) for position, slot in run.places)
        return KvUse(use.cache, use.source, use.num_cached, (*use.copies, *loads, *saves))

    def moved(self, cache: int, tokens: array[int]) -> None:
        """The request that runs in a cache has come so far: the cache holds these tokens."""
        if self._kept:
            kept, run = self._kept[cache], self._running[cache]
            kept.tokens, kept.scope, kept.num_prompt = tokens, run.scope, 0
            self._copied(run, tokens, len(tokens))

    def _copied(self, run: _Run, tokens: array[int], num_positions: int, *, has_ended: bool = False) -> None:
        """Copies of a request's state were made behind so many positions at most, and no more come if it `has_ended`."""
        done = [place for place in run.places if place[0] <= num_positions]  # one of the answer may have its slot again
        left = [] if has_ended else [place for place in run.places if place[0] > num_positions]
        self.states.release({slot for _, slot in run.places} - {slot for _, slot in left})
        run.places = left
        if done:
            self.states.made(run.scope, tokens, done, run.stems)

    def _usable(self, cache: int, common: int, copies: dict[int, int]) -> int:
        """Positions of a cache that the prompt, which begins with `common` of them, can go on behind."""
        kept = self._kept[cache]
        if self.ring_positions and cache in self._running:
            return 0  # it overwrites what its ring has, while it is copied as well
        if self._is_recurrent:
            return max((at for at in (*self._own(cache), *copies) if at <= common), default=0)
        return common if self.is_intact(common, kept.num_written) else 0

    def _own(self, cache: int) -> tuple[int, ...]:
        """Where the state of a cache stands, if a request can go on behind it."""
        kept = self._kept[cache]
        return () if cache in self._running or not kept.goes_on else (kept.num_written,)

    def is_intact(self, num_positions: int, num_written: int) -> bool:
        """Whether the first `num_positions` can be used after `num_written` were written; see the top of this file."""
        if not self.ring_positions or num_written <= self.ring_positions:
            return True
        return num_positions - self._window + 1 >= num_written - self.ring_positions

    def give_back(self, tokens: Sequence[int], num_positions: int, num_written: int, cache: int) -> None:
        """The request in a cache has ended: that holds the first `num_positions` of `tokens`; it wrote below `num_written`."""
        if self._kept:
            kept, run = self._kept[cache], self._running.pop(cache)
            kept.tokens, kept.scope = array("I", tokens[:num_positions]), run.scope
            kept.num_prompt, kept.num_written = min(run.num_prompt, num_positions), max(num_written, run.num_inherited)
            kept.goes_on = num_written > run.num_prompt + 1 or num_written == self.states.strided(num_written, run.use.num_cached)
            self._copied(run, kept.tokens, num_positions, has_ended=True)

    def save(self, cache: int) -> KvUse | None:
        """What is to be copied to the block pool of a cache whose request has ended; None if nothing is."""
        if not self._kept:
            return None
        kept, copies = self._kept[cache], tuple[KvCopy, ...]()
        if self.blocks is not None:
            copies = tuple(KvCopy(KvCopyKind.MOVE_STATE, slot, to) for slot, to in self.states.spill())
            copies += self.blocks.save(kept.scope, kept.tokens)
            if kept.goes_on and (slot := self.states.end(kept.scope, kept.tokens)) is not None:
                copies += (KvCopy(KvCopyKind.SAVE_STATE, slot, len(kept.tokens)),)
        return KvUse(cache, cache, 0, copies) if copies else None

    def forget(self, cache: int) -> None:
        """Nothing is kept any more: a device may have cleared all its caches. The request in this one has ended."""
        if (run := self._running.pop(cache, None)) is not None:
            self.states.release(slot for _, slot in run.places)
        for kept in self._kept:
            kept.tokens, kept.num_written, kept.last_used = array("I"), 0, 0
        self.states.clear()
        if self.blocks is not None:
            self.blocks.clear()
