"""The books of the KV caches against caches that keep everything, place by place: many requests one after the other.

The twin holds, at each place of each cache, which token of which position stands there: a layer that keeps all positions, and a
windowed one in a ring. Whatever the books allow must be there; and what they leave unused must not be. A second twin knows of
which tokens states and their copies were made.
"""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kog_dist.decode.request import KvCopyKind, KvUse
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.coordinator import kept_caches, kept_states
from kog_dist.workers.coordinator.kept_blocks import num_common
from kog_dist.workers.coordinator.kept_caches import KeptCaches

Place = tuple[int, int] | None  # position and token


@dataclass
class TwinCache:
    """One cache of a rank. `tokens`: the sequence it was said to hold at the end of its last request."""

    ring: list[Place]
    whole: dict[int, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)

    def copied(self) -> TwinCache:
        return TwinCache(list(self.ring), dict(self.whole), list(self.tokens))

    def write(self, position: int, token: int) -> None:
        self.whole[position] = token
        self.ring[position % len(self.ring)] = position, token

    def can_go_on(self, prompt: list[int], num_cached: int, window: int) -> bool:
        """Whether position `num_cached` would read nothing but the prompt's tokens."""
        if any(self.whole.get(position) != prompt[position] for position in range(num_cached)):
            return False
        seen = range(max(0, num_cached - window + 1), num_cached)
        return all(self.ring[p % len(self.ring)] == (p, prompt[p]) for p in seen)


class KeptCachesMachine(RuleBasedStateMachine):
    @initialize(num_caches=st.integers(1, 3), window=st.integers(2, 5), slack=st.integers(0, 5))
    def begin(self, num_caches: int, window: int, slack: int) -> None:
        self.window = window
        self.books = KeptCaches(KvLayout(num_caches, window + slack), window)
        self.caches = [TwinCache([None] * (window + slack)) for _ in range(num_caches)]
        self.next_token = 100  # every token is another one, so that a wrong one is never right by chance

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @rule(which=st.integers(0, 2), share=st.floats(0, 1), num_new=st.integers(1, 12), num_answer=st.integers(1, 12),
          num_unwanted=st.integers(0, 6))  # fmt: skip
    def request_goes_on_behind_a_kept_sequence(
        self, which: int, share: float, num_new: int, num_answer: int, num_unwanted: int
    ) -> None:
        """`num_unwanted`: tokens that were decoded behind a stop string, written and not kept."""
        kept = self.caches[which % len(self.caches)].tokens
        self.run(kept[: round(share * len(kept))] + self.fresh(num_new), num_answer, num_unwanted, reuse=True)

    @rule(which=st.integers(0, 2), num_less=st.integers(0, 4), num_answer=st.integers(1, 4))
    def request_steps_back(self, which: int, num_less: int, num_answer: int) -> None:
        kept = self.caches[which % len(self.caches)].tokens
        self.run(kept[: max(1, len(kept) - num_less)] or self.fresh(1), num_answer, 0, reuse=True)

    @rule(num_new=st.integers(1, 30))
    def request_that_declines(self, num_new: int) -> None:
        self.run(self.fresh(num_new), 2, 0, reuse=False)

    @rule()
    def ranks_clear_their_caches(self) -> None:
        self.books.forget(0)
        for cache in self.caches:
            cache.ring[:] = [None] * len(cache.ring)
            cache.whole.clear()
            cache.tokens.clear()

    def run(self, prompt: list[int], num_answer: int, num_unwanted: int, *, reuse: bool) -> None:
        use = self.books.take(prompt, reuse=reuse)
        usable = [
            max((n for n in range(len(prompt)) if n <= len(cache.tokens) and cache.can_go_on(prompt, n, self.window)), default=0)
            for cache in self.caches
        ]
        assert use.num_cached == (max(usable) if reuse else 0), "not what is there"
        source = self.caches[use.source]
        assert source.can_go_on(prompt, use.num_cached, self.window)
        if use.cache != use.source:
            self.caches[use.cache] = source.copied()
        cache = self.caches[use.cache]
        sequence = prompt + self.fresh(num_answer + num_unwanted)
        for position in range(use.num_cached, len(sequence) - 1):
            assert cache.can_go_on(sequence, position, self.window), f"position {position} reads what is not there"
            cache.write(position, sequence[position])
        num_kept = len(sequence) - 1 - num_unwanted
        cache.tokens = sequence[:num_kept]
        self.books.give_back(sequence, num_kept, len(sequence) - 1, use.cache)


TestKeptCaches = KeptCachesMachine.TestCase
TestKeptCaches.settings = settings(max_examples=150, stateful_step_count=12, deadline=None)


# ---- a state that every token changes ----
STEP, BLOCK_TOKENS = 8, 4


@dataclass
class TwinState:
    """What a cache of a rank holds: tokens by position, and of which tokens its state was made."""

    keys: dict[int, int] = field(default_factory=dict)
    state: tuple[int, ...] = ()


class KeptStatesMachine(RuleBasedStateMachine):
    """The books of a model with a state against ranks that do what they are told, and know what every copy was made of."""

    @initialize(num_caches=st.integers(1, 3), states=st.sampled_from([0, 1, 3, 7, 500]), slots=st.sampled_from([0, 3, 12, 500]))
    def begin(self, num_caches: int, states: int, slots: int) -> None:
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(kept_states, "STEP", STEP))
        self.patches.enter_context(patch.object(kept_caches, "_WORTH", 1))
        layout = KvLayout(num_caches, 0, BLOCK_TOKENS if slots else 0, slots, 0, states)
        self.books = KeptCaches(layout, None, is_recurrent=True)
        self.caches = [TwinState() for _ in range(num_caches)]
        self.blocks: dict[int, dict[int, int]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.kept: dict[str, list[tuple[int, ...]]] = {"": [], "mine": []}
        self.is_roomy = min(states, slots) == 500
        self.next_token = 100

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.close()

    def fresh(self, count: int) -> tuple[int, ...]:
        self.next_token += count
        return tuple(range(self.next_token - count, self.next_token))

    @rule(
        scope=st.sampled_from(["", "mine"]), which=st.integers(0, 9), share=st.floats(0, 1), num_new=st.integers(1, 40),
        num_answer=st.integers(1, 2 * STEP), ends=st.floats(0, 1), reuse=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def request(
        self, scope: str, which: int, share: float, num_new: int, num_answer: int, ends: float, reuse: bool
    ) -> None:  # fmt: skip
        """Of one that begins like an earlier one, or not; it ends within its prompt, within its answer, or with it."""
        kept = self.kept[scope]
        stem = kept[which % len(kept)] if kept else ()
        prompt = stem[: round(share * len(stem))] + self.fresh(num_new)
        use = self.books.take(prompt, reuse=reuse, scope=scope, num_answer=num_answer)
        cache, is_told = self.caches[use.cache], tuple(prompt[: use.num_cached])
        copies = [copy for copy in use.copies if copy.kind is not KvCopyKind.SAVE_STATE]
        if use.cache != use.source:
            source = self.caches[use.source]
            cache.keys, cache.state = dict(list(source.keys.items())[: use.num_cached]), source.state
        for kind, slot, place in copies:
            if kind is KvCopyKind.LOAD:
                cache.keys |= {place * BLOCK_TOKENS + at: token for at, token in self.blocks[slot].items()}
            else:
                assert (kind, place) == (KvCopyKind.LOAD_STATE, use.num_cached)
                cache.state = self.states[slot]
        assert reuse or not use.num_cached
        assert not is_told or cache.state == is_told, "the state is another one's, or of another position"
        assert all(cache.keys[position] == token for position, token in enumerate(is_told))
        if self.is_roomy and reuse:
            common = max((num_common(array("I", other), array("I", prompt[:-1])) for other in kept), default=0)
            assert common - use.num_cached <= STEP, "more is read anew than it must be"
        sequence = prompt + self.fresh(num_answer)
        held = max(use.num_cached, round(ends * (len(sequence) - 1)))
        saves = [copy for copy in use.copies if copy.kind is KvCopyKind.SAVE_STATE]
        assert [copy.place for copy in saves] == sorted(copy.place for copy in saves)
        for position in range(use.num_cached, held + 1):
            while saves and saves[0].place == position:
                self.states[saves.pop(0).slot] = sequence[:position]
            if position < held:
                cache.keys[position] = sequence[position]
        cache.keys = {position: cache.keys[position] for position in range(held)}
        cache.state = sequence[:held]
        self.books.give_back(sequence, held, held, use.cache)
        kept.append(sequence[:held])
        if (saved := self.books.save(use.cache)) is not None:
            self.save(cache, saved)

    def save(self, cache: TwinState, saved: KvUse) -> None:
        for kind, slot, place in saved.copies:
            if kind is KvCopyKind.SAVE:
                first = place * BLOCK_TOKENS
                self.blocks[slot] = {at: cache.keys[first + at] for at in range(BLOCK_TOKENS) if first + at in cache.keys}
            else:
                assert (kind, place) == (KvCopyKind.SAVE_STATE, len(cache.state))
                self.states[slot] = cache.state

    @rule()
    def ranks_clear_their_caches(self) -> None:
        self.books.forget(0)
        self.kept = {"": [], "mine": []}
        self.states, self.blocks = {}, {}
        for cache in self.caches:
            cache.keys, cache.state = {}, ()


TestKeptStates = KeptStatesMachine.TestCase
TestKeptStates.settings = settings(max_examples=150, stateful_step_count=12, deadline=None)
