"""The block pool's books: what a request gets from it is what its prompt says, however little room there is."""

from __future__ import annotations

from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.kept_blocks import KeptBlocks
from kog_dist.workers.kept_caches import KeptCaches

LOAD, SAVE, MOVE = KvCopyKind.LOAD, KvCopyKind.SAVE, KvCopyKind.MOVE
A = tuple(range(100, 110))


def ids(*parts: tuple[int, ...]) -> array[int]:
    return array("I", [token for part in parts for token in part])


def test_a_sequence_is_saved_once_and_found_by_any_beginning() -> None:
    blocks = KeptBlocks(4, 8)
    assert blocks.save("", ids(A)) == (KvCopy(SAVE, 0, 0), KvCopy(SAVE, 1, 1), KvCopy(SAVE, 2, 2))
    assert blocks.save("", ids(A)) == ()
    assert blocks.num_used == (3, 0)
    for count in range(1, 10):
        found, path = blocks.match("", ids(A[:count], (7,)))
        assert (found, len(path)) == (count, -(-count // 4))
    found, path = blocks.match("", ids(A, (7, 8)))
    assert blocks.load(path, 1) == (KvCopy(LOAD, 1, 1), KvCopy(LOAD, 2, 2))


def test_what_goes_on_behind_a_short_block_takes_its_slot() -> None:
    blocks = KeptBlocks(4, 8)
    blocks.save("", ids(A))
    assert blocks.save("", ids(A, (7, 8, 9))) == (KvCopy(SAVE, 2, 2), KvCopy(SAVE, 3, 3))
    assert blocks.save("", ids(A, (7, 5))) == (KvCopy(SAVE, 4, 2),), "another end beside it"
    assert blocks.match("", ids(A, (7, 8, 9)))[0] == 13
    assert blocks.match("", ids(A, (7, 5, 1)))[0] == 12
    blocks.check()


def test_scopes_know_nothing_of_each_other() -> None:
    blocks = KeptBlocks(4, 8)
    blocks.save("mine", ids(A))
    assert blocks.match("yours", ids(A)) == (0, [])
    assert blocks.match("", ids(A)) == (0, [])
    assert len(blocks.save("yours", ids(A))) == 3


def test_the_least_recently_used_leaf_makes_room() -> None:
    blocks = KeptBlocks(4, 3)
    blocks.save("", ids(A[:4], (1, 1, 1, 1)))
    blocks.save("", ids(A[:4], (2, 2, 2, 2)))
    blocks.load(blocks.match("", ids(A[:4], (1, 1, 1, 1)))[1], 0)
    assert blocks.save("", ids(A[:4], (3, 3, 3, 3))) == (KvCopy(SAVE, 2, 1),), "that with the twos, not what they began with"
    assert [blocks.match("", ids(A[:4], (last,) * 4))[0] for last in (1, 2, 3)] == [8, 4, 8]
    assert blocks.save("", ids((9,) * 16)) == tuple(KvCopy(SAVE, slot, depth) for depth, slot in enumerate((1, 2, 0))), (
        "no more room"
    )
    assert blocks.match("", ids((9,) * 16))[0] == 12
    blocks.check()


def test_the_host_takes_what_the_device_has_no_room_for() -> None:
    blocks = KeptBlocks(4, 2, 2)
    blocks.save("", ids(A[:8]))
    assert blocks.save("", ids((1,) * 4)) == (KvCopy(MOVE, 1, 2), KvCopy(SAVE, 1, 0))
    assert blocks.load(blocks.match("", ids(A[:8]))[1], 0) == (KvCopy(LOAD, 0, 0), KvCopy(LOAD, 2, 1))
    assert blocks.save("", ids(A[:8])) == (KvCopy(MOVE, 1, 3), KvCopy(SAVE, 1, 1)), "the cache has it, so it comes back"
    assert blocks.num_used == (2, 1)
    blocks.save("", ids((2,) * 8))
    assert blocks.num_used == (2, 2)
    assert [blocks.match("", ids((last,) * 8))[0] for last in (1, 2)] == [0, 8], "what was used longest ago is forgotten"
    assert blocks.match("", ids(A[:8]))[0] == 8
    blocks.check()


def test_little_is_not_worth_a_copy() -> None:
    caches = KeptCaches(KvLayout(1, block_tokens=64, num_slots=8), None)
    first, second = tuple(range(1000, 1100)), tuple(range(2000, 2100))
    for prompt in (first, second):
        assert caches.take(prompt, reuse=True) == KvUse()
        caches.give_back(prompt, len(prompt), len(prompt))
        assert caches.save() is not None
    assert caches.take(first[:20], reuse=True) == KvUse()
    assert caches.take(first, reuse=False) == KvUse()
    assert caches.take(first, reuse=True) == KvUse(0, 0, 99, (KvCopy(LOAD, 0, 0), KvCopy(LOAD, 1, 1)))
    caches.give_back(first, 100, 100)
    caches.forget()
    assert caches.take(first, reuse=True) == KvUse()


class KeptBlocksMachine(RuleBasedStateMachine):
    """The twin holds at each position of each cache, and of each slot of the pool, which token stands there."""

    @initialize(
        num_caches=st.integers(1, 2), block_tokens=st.sampled_from([3, 4]), slots=st.integers(1, 6), host=st.integers(0, 4)
    )
    def begin(self, num_caches: int, block_tokens: int, slots: int, host: int) -> None:
        self.block_tokens = block_tokens
        self.books = KeptCaches(KvLayout(num_caches, 0, block_tokens, slots, host), None)
        self.caches: list[dict[int, int]] = [{} for _ in range(num_caches)]
        self.slots: list[dict[int, int]] = [{} for _ in range(slots + host)]  # by position in the sequence
        self.kept: list[tuple[str, list[int]]] = [("", [0])]
        self.next_token = 100

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def copy(self, use: KvUse) -> None:
        cache = self.caches[use.cache]
        for kind, slot, place in use.copies:
            if kind is MOVE:
                self.slots[place] = dict(self.slots[slot])
                continue
            positions = range(place * self.block_tokens, (place + 1) * self.block_tokens)
            if kind is SAVE:
                self.slots[slot] = {position: cache[position] for position in positions if position in cache}
            for position in positions if kind is LOAD else ():
                cache.pop(position, None)
                if position in self.slots[slot]:
                    cache[position] = self.slots[slot][position]

    @rule(which=st.integers(0, 30), share=st.floats(0, 1), num_new=st.integers(1, 12), num_answer=st.integers(1, 12),
          scope=st.sampled_from(["", "", "other"]), reuse=st.booleans() | st.just(True))  # fmt: skip
    def request(self, which: int, share: float, num_new: int, num_answer: int, scope: str, reuse: bool) -> None:
        _, kept = self.kept[which % len(self.kept)]
        prompt = kept[: round(share * len(kept))] + self.fresh(num_new)
        use = self.books.take(prompt, reuse=reuse, scope=scope)
        if use.copies:
            assert use.cache == use.source
        self.copy(use)
        assert use.num_cached < len(prompt)
        assert reuse or not use.num_cached
        own = [sequence for of, sequence in self.kept if of == scope]
        is_own = any(sequence[: use.num_cached] == prompt[: use.num_cached] for sequence in own)
        assert is_own or not use.num_cached, "nobody uses another scope's"
        if use.cache != use.source:
            self.caches[use.cache] = dict(self.caches[use.source])
        cache = self.caches[use.cache]
        assert [cache.get(position) for position in range(use.num_cached)] == prompt[: use.num_cached]
        sequence = prompt + self.fresh(num_answer)
        for position in range(use.num_cached, len(sequence)):
            cache[position] = sequence[position]
        self.books.give_back(sequence, len(sequence) - 1, len(sequence))
        if (saved := self.books.save()) is not None:
            self.copy(saved)
        self.kept.append((scope, sequence))

    @rule()
    def ranks_forget(self) -> None:
        self.books.forget()

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "books"):
            assert self.books.blocks is not None
            self.books.blocks.check()
            for slot, block in self.books.blocks._blocks.items():
                first = block.depth * self.block_tokens
                found = [self.slots[slot].get(first + i) for i in range(len(block.tokens))]
                assert found == list(block.tokens)


KeptBlocksMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKeptBlocks = pytest.mark.timeout(120)(KeptBlocksMachine.TestCase)
