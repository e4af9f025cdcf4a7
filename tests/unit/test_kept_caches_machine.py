"""The books of the KV caches against caches that keep everything, place by place, over many requests.

The twin holds, at each place of each cache, which token of which position stands there: a layer that keeps all positions, and a
windowed one in a ring. Whatever the books allow must be there; and what they leave unused must not be. A second twin knows of
which tokens states and their copies were made, by requests that run together.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest.mock import patch

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


# ---- a state that every token changes, and requests that run together ----
STEP, BLOCK_TOKENS = 8, 4
NUM_CROWDS, NUM_STEPS = 60, 120


@dataclass
class TwinState:
    """What a cache of a rank holds: tokens by position, and of which tokens its state was made."""

    keys: dict[int, int] = field(default_factory=dict)
    state: tuple[int, ...] = ()


@dataclass
class TwinRun:
    """A request whose use the books have said. `held`: tokens that its cache holds."""

    scope: str
    use: KvUse
    sequence: tuple[int, ...]
    held: int
    has_begun: bool = False

    def __post_init__(self) -> None:
        self.saves = deque(copy for copy in self.use.copies if copy.kind is KvCopyKind.SAVE_STATE)
        assert [copy.place for copy in self.saves] == sorted(copy.place for copy in self.saves)

    @property
    def own_slots(self) -> set[int]:
        """Of copies that are made some time; those at its beginning are made before whatever is told next."""
        return {copy.slot for copy in self.saves if copy.place > self.held}


class KeptStatesMachine(RuleBasedStateMachine):
    """The books of a model with a state against ranks that do what they are told, and know what every copy was made of.

    Ranks are behind: they take over what they were told later, in its order, and running requests come as far as they like
    meanwhile. Pools have fewer slots than requests make copies, or room for all.
    """

    @initialize(
        num_caches=st.integers(1, 4), states=st.sampled_from([0, 1, 3, 7, 500]), slots=st.sampled_from([0, 3, 12, 500]),
        stride=st.sampled_from([1, 4]), host_states=st.sampled_from([0, 2, 20]),
    )  # fmt: skip
    def begin(self, num_caches: int, states: int, slots: int, stride: int, host_states: int) -> None:
        self.patches = ExitStack()
        self.patches.enter_context(patch.object(kept_states, "STEP", STEP))
        self.patches.enter_context(patch.object(kept_caches, "_WORTH", 1))
        layout = KvLayout(num_caches, 0, BLOCK_TOKENS if slots else 0, slots, 0, states, stride, host_states)
        self.stride, self.num_slots, self.decoded = stride, states, set[int]()
        self.books = KeptCaches(layout, None, is_recurrent=True, parallel=num_caches)
        self.caches = [TwinState() for _ in range(num_caches)]
        self.blocks: dict[int, dict[int, int]] = {}
        self.states: dict[int, tuple[int, ...]] = {}
        self.kept: dict[str, list[tuple[int, ...]]] = {"": [], "mine": []}
        self.running: list[TwinRun] = []
        self.told: deque[TwinRun | KvUse] = deque()  # and not done yet
        self.is_roomy = min(states, slots) == 500
        self.next_token = 100

    def teardown(self) -> None:
        if hasattr(self, "patches"):
            self.patches.close()

    def fresh(self, count: int) -> tuple[int, ...]:
        self.next_token += count
        return tuple(range(self.next_token - count, self.next_token))

    @rule(
        scope=st.sampled_from(["", "", "mine"]), which=st.integers(0, 9), share=st.floats(0, 1), num_new=st.integers(1, 40),
        num_answer=st.integers(1, 2 * STEP), reuse=st.sampled_from([True, True, True, False]),
        ends=st.one_of(st.none(), st.floats(0, 1)),
    )  # fmt: skip
    def request(
        self, scope: str, which: int, share: float, num_new: int, num_answer: int, reuse: bool, ends: float | None
    ) -> None:  # fmt: skip
        """Of one that begins like another, ended or not, or like none. `ends`: at once, within its prompt, within its answer, or
        with it; None: it goes on.
        """
        if len(self.running) == len(self.caches):
            return
        stems = [*self.kept[scope], *(one.sequence[: one.held] for one in self.running if one.scope == scope)]
        stem = stems[which % len(stems)] if stems else ()
        prompt = stem[: round(share * len(stem))] + self.fresh(num_new)
        for one in self.running:
            self.books.moved(one.use.cache, array("I", one.sequence[: one.held]))
        use = self.books.take(prompt, reuse=reuse, scope=scope, num_answer=num_answer)
        run = TwinRun(scope, use, prompt + self.fresh(num_answer), use.num_cached)
        assert reuse or not use.num_cached
        known, places = prompt[: use.num_cached], [copy.place for copy in run.saves if copy.place < len(prompt)]
        assert use.num_cached % self.stride == 0 or not self.decoded.isdisjoint(known), "bits that prefill does not give"
        assert all((place - use.num_cached) % self.stride == 0 for place in places), "bits hang on which copies are made"
        self.decoded.update(run.sequence[len(prompt) :])
        slots = {copy.slot for copy in run.saves}
        assert max(slots, default=-1) < self.num_slots, "a copy is made on the device"
        assert not any(slots & other.own_slots for other in self.running), "a slot for copies of two that run"
        if self.is_roomy and reuse:
            common = max((num_common(array("I", other), array("I", prompt[:-1])) for other in self.kept[scope]), default=0)
            assert common - use.num_cached < STEP + self.stride, "more is read anew than it must be"
        self.running.append(run)
        self.told.append(run)
        if ends is not None:
            self.ranks_do_what_they_were_told(len(self.told))
            self.go_on(run, round(ends * (len(run.sequence) - 1)) - run.held)
            self.end(run)

    @rule(count=st.integers(1, 5))
    def ranks_do_what_they_were_told(self, count: int) -> None:
        for _ in range(min(count, len(self.told))):
            told = self.told.popleft()
            if isinstance(told, TwinRun):
                self.begin_run(told)
            else:
                self.save(told)

    def begin_run(self, run: TwinRun) -> None:
        use, cache, known = run.use, self.caches[run.use.cache], run.sequence[: run.use.num_cached]
        if use.cache != use.source:
            source = self.caches[use.source]
            cache.keys, cache.state = dict(source.keys), source.state
        for kind, slot, place in use.copies:
            if kind is KvCopyKind.LOAD:
                cache.keys |= {place * BLOCK_TOKENS + at: token for at, token in self.blocks[slot].items()}
            elif kind is KvCopyKind.LOAD_STATE:
                assert place == use.num_cached
                cache.state = self.states[slot]
        assert not known or cache.state == known, "the state is another one's, or of another position"
        assert all(cache.keys[position] == token for position, token in enumerate(known))
        cache.keys, cache.state, run.has_begun = dict(enumerate(known)), known, True
        self.go_on(run, 0)

    @rule(which=st.integers(0, 3), count=st.integers(1, 40))
    def one_goes_on(self, which: int, count: int) -> None:
        if begun := [one for one in self.running if one.has_begun]:
            self.go_on(begun[which % len(begun)], count)

    def go_on(self, run: TwinRun, count: int) -> None:
        cache = self.caches[run.use.cache]
        for position in range(run.held, min(run.held + max(count, 0), len(run.sequence) - 1) + 1):
            run.held, cache.state = position, run.sequence[:position]
            cache.keys |= dict(enumerate(run.sequence[max(position - 1, 0) : position], max(position - 1, 0)))
            while run.saves and run.saves[0].place == position:
                self.states[run.saves.popleft().slot] = cache.state

    @rule(which=st.integers(0, 3))
    def one_ends(self, which: int) -> None:
        if begun := [one for one in self.running if one.has_begun]:
            self.end(begun[which % len(begun)])

    def end(self, run: TwinRun) -> None:
        self.running.remove(run)
        self.books.give_back(run.sequence, run.held, run.held, run.use.cache)
        self.kept[run.scope].append(run.sequence[: run.held])
        if (saved := self.books.save(run.use.cache)) is not None:
            self.told.append(saved)

    def save(self, saved: KvUse) -> None:
        cache = self.caches[saved.cache]
        for kind, slot, place in saved.copies:
            if kind is KvCopyKind.SAVE:
                first = place * BLOCK_TOKENS
                self.blocks[slot] = {at: cache.keys[first + at] for at in range(BLOCK_TOKENS) if first + at in cache.keys}
            elif kind is KvCopyKind.MOVE_STATE:
                assert slot < self.num_slots <= place
                self.states[place] = self.states.pop(slot)
            else:
                assert (kind, place) == (KvCopyKind.SAVE_STATE, len(cache.state))
                self.states[slot] = cache.state

    @rule(which=st.integers(0, 3))
    def one_fails(self, which: int) -> None:
        """What is kept is forgotten; others go on."""
        if begun := [one for one in self.running if one.has_begun]:
            failed = begun[which % len(begun)]
            self.running.remove(failed)
            self.books.forget(failed.use.cache)
            self.forgotten()

    @rule()
    def ranks_clear_their_caches(self) -> None:
        if self.running:
            return
        self.ranks_do_what_they_were_told(len(self.told))
        self.books.forget(0)
        self.forgotten()
        self.states, self.blocks = {}, {}
        for cache in self.caches:
            cache.keys, cache.state = {}, ()

    def forgotten(self) -> None:
        self.kept = {"": [], "mine": []}
        self.is_roomy &= not self.running  # whose copies go on, but not those that they went on behind

    @invariant()
    def slots_are_reserved_for_copies_that_may_come(self) -> None:
        if hasattr(self, "running"):
            reserved = self.books.states._reserved
            assert all(reserved >= one.own_slots for one in self.running)
            assert self.running or not reserved


TestKeptStates = KeptStatesMachine.TestCase
TestKeptStates.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def test_in_crowds_with_few_slots_for_copies() -> None:
    """What the machine does, many times in a row, so that slots are used again while others run."""
    chance = random.Random(1)
    for _ in range(NUM_CROWDS):
        crowd = KeptStatesMachine()
        crowd.begin(
            chance.randint(2, 4),
            chance.choice([2, 3, 5, 9]),
            chance.choice([12, 500]),
            chance.choice([1, 4]),
            chance.choice([0, 2, 20]),
        )
        for _ in range(NUM_STEPS):
            step = chance.random()
            if step < 0.3:
                ends = chance.choice([None, None, 1.0])
                crowd.request("", chance.randrange(10), chance.random(), chance.randint(1, 40), chance.randint(1, 16), True, ends)
            elif step < 0.5:
                crowd.ranks_do_what_they_were_told(chance.randint(1, 3))
            elif step < 0.8:
                crowd.one_goes_on(chance.randrange(4), chance.randint(1, 40))
            else:
                crowd.one_ends(chance.randrange(4))
            crowd.slots_are_reserved_for_copies_that_may_come()
        crowd.teardown()
