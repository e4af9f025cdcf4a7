"""The block pool's books: what a request gets from it is what its prompt says, however little room there is."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

import pytest

from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.coordinator import kept_caches
from kog_dist.workers.coordinator.kept_blocks import KeptBlocks
from kog_dist.workers.coordinator.kept_caches import KeptCaches

LOAD, SAVE, MOVE = KvCopyKind.LOAD, KvCopyKind.SAVE, KvCopyKind.MOVE
A = tuple(range(100, 110))
Tokens = tuple[int, ...]


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
        caches.give_back(prompt, len(prompt), len(prompt), 0)
        assert caches.save(0) is not None
    for prompt, reuse in ((first[:20], True), (first, False)):
        assert caches.take(prompt, reuse=reuse) == KvUse()
        caches.give_back(second, len(second), len(second), 0)
    assert caches.take(first, reuse=True) == KvUse(0, 0, 99, (KvCopy(LOAD, 0, 0), KvCopy(LOAD, 1, 1)))
    caches.give_back(first, 100, 100, 0)
    caches.forget(0)
    assert caches.take(first, reuse=True) == KvUse()


@dataclass
class World:
    """Requests one after the other, drawn from three tokens, so that sequences begin alike by chance all the time.

    The twin holds at each position of each cache, and of each slot of the pool, whose sequence was computed up to there: keys and
    values depend on all tokens before them, and another scope's are nobody else's.
    """

    books: KeptCaches
    block_tokens: int
    chance: random.Random
    caches: list[dict[int, tuple[str, Tokens]]]
    slots: list[dict[int, tuple[str, Tokens]]]
    kept: dict[int, tuple[str, Tokens]] = field(default_factory=dict)  # by cache: what its last request left

    @classmethod
    def drawn(cls, seed: int) -> World:
        chance = random.Random(seed)
        num_caches, block_tokens = chance.randint(1, 3), chance.choice([2, 3, 4])
        slots, host = chance.randint(1, 8), chance.choice([0, 0, 2, 5])
        books = KeptCaches(KvLayout(num_caches, 0, block_tokens, slots, host), None)
        return cls(books, block_tokens, chance, [{} for _ in range(num_caches)], [{} for _ in range(slots + host)])

    def tokens(self, count: int) -> Tokens:
        return tuple(self.chance.choices((1, 2, 3), weights=(4, 2, 1), k=count))

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

    def step(self) -> None:
        chance, books = self.chance, self.books
        if chance.random() < 0.01:
            books.forget(0)
            self.kept.clear()
        scope, reuse = chance.choice(["", "", "b", "c"]), chance.random() < 0.9
        prompt = self.tokens(chance.randint(1, 14))
        if self.kept and chance.random() < 0.5:
            _, former = self.kept[chance.choice(list(self.kept))]
            prompt = former[: chance.randint(0, len(former))][:20] + prompt
        use = books.take(prompt, reuse=reuse, scope=scope)
        most = max((common(prompt[:-1], tokens) for of, tokens in self.kept.values() if of == scope), default=0)
        assert (most if reuse else 0) <= use.num_cached < len(prompt)
        assert reuse or not use.num_cached
        assert not use.copies or use.cache == use.source
        self.copy(use)
        if use.cache != use.source:
            self.caches[use.cache] = dict(self.caches[use.source])
        cache = self.caches[use.cache]
        for position in range(use.num_cached):
            assert cache.get(position) == (scope, prompt[: position + 1]), "another sequence's keys and values"
        sequence = prompt + self.tokens(chance.randint(1, 6))
        for position in range(use.num_cached, len(sequence)):
            cache[position] = scope, sequence[: position + 1]
        num_kept = len(sequence) - chance.choice([1, 1, 1, 3])  # as many are known when it was stopped
        num_kept = max(num_kept, use.num_cached)
        books.give_back(sequence, num_kept, len(sequence), use.cache)
        self.kept[use.cache] = scope, sequence[:num_kept]
        if (saved := books.save(use.cache)) is not None:
            self.copy(saved)
        self.check()

    def check(self) -> None:
        assert self.books.blocks is not None
        self.books.blocks.check()
        for slot, block in self.books.blocks._blocks.items():
            way, node = Tokens(), block
            while node.parent is not None:
                way, node = (*node.tokens, *way), node.parent
            first = block.depth * self.block_tokens
            for place in range(len(block.tokens)):
                assert self.slots[slot].get(first + place) == (node.scope, way[: first + place + 1])


def common(left: Tokens, right: Tokens) -> int:
    return next(
        (place for place, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


@pytest.mark.parametrize("worth", [1, 4])
@pytest.mark.parametrize("part", range(4))
def test_requests_get_what_was_computed_for_their_own_beginning(worth: int, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_caches, "_WORTH", worth)
    for seed in range(25 * part, 25 * part + 25):
        world = World.drawn(seed)
        for _ in range(40):
            world.step()


def test_a_root_goes_with_its_last_block() -> None:
    """Scopes come without end: every user may have a `cache_salt`."""
    blocks = KeptBlocks(4, 3, 2)
    for number in range(50):
        blocks.save(f"user {number}", ids(A[:4]))
        blocks.check()
    assert len(blocks._roots) == 5
    none = KeptBlocks(4, 0)
    for number in range(50):
        assert none.save(f"user {number}", ids(A)) == ()
    assert len(none._roots) == 0
