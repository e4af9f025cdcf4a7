"""Which kept sequence a request goes on behind, and when a ring of positions still allows it."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kog_dist.decode.request import KvUse
from kog_dist.runtime.control import KvLayout
from kog_dist.workers.coordinator.kept_blocks import num_common
from kog_dist.workers.coordinator.kept_caches import KeptCaches

A = tuple(range(100, 140))


def run(caches: KeptCaches, prompt: tuple[int, ...], answer: tuple[int, ...] = (7, 8, 9), *, reuse: bool = True) -> KvUse:
    """A whole request; the last token of an answer is never decoded itself."""
    use = caches.take(prompt, reuse=reuse)
    sequence = prompt + answer
    caches.give_back(sequence, len(sequence) - 1, len(sequence) - 1, use.cache)
    return use


@pytest.fixture
def caches() -> KeptCaches:
    return KeptCaches(KvLayout(3), None)


def test_a_conversation_goes_on_where_it_was(caches: KeptCaches) -> None:
    assert run(caches, A) == KvUse(0, 0, 0)
    assert run(caches, (*A, 7, 8, 9, 1, 2)) == KvUse(0, 0, 42), "two of the answer's three tokens were decoded"
    assert run(caches, (*A, 7, 8, 9, 1, 2, 7, 8, 9, 3)) == KvUse(0, 0, 47)


def test_the_last_prompt_token_is_always_decoded(caches: KeptCaches) -> None:
    run(caches, A)
    assert run(caches, A) == KvUse(0, 0, 39), "the same prompt again"
    assert run(caches, A[:30]) == KvUse(0, 0, 29), "the kept sequence is longer than the prompt"
    assert run(caches, A[:1]) == KvUse(1, 1, 0), "nothing to use"


def test_a_small_part_is_copied_so_that_the_other_conversation_can_go_on(caches: KeptCaches) -> None:
    run(caches, A)
    assert run(caches, (*A[:10], 1, 2, 3)) == KvUse(1, 0, 10)
    assert run(caches, (*A, 7, 8, 5)) == KvUse(0, 0, 42), "the first conversation is still whole"
    assert run(caches, (*A[:10], 1, 2, 3, 7, 8, 5)) == KvUse(1, 1, 15), "and so is the second"


@pytest.mark.parametrize(("num_common", "use"), [(21, KvUse(0, 0, 21)), (20, KvUse(1, 0, 20))])
def test_half_a_sequence_is_cut_and_less_is_copied(caches: KeptCaches, num_common: int, use: KvUse) -> None:
    run(caches, A)  # 42 positions
    assert run(caches, (*A[:num_common], 1)) == use


def test_a_sequence_that_was_copied_has_been_used(caches: KeptCaches) -> None:
    run(caches, A)
    run(caches, (1, *A))
    assert run(caches, (*A[:10], 2)) == KvUse(2, 0, 10)
    assert run(caches, (3,)) == KvUse(1, 1, 0), "not the one that was just copied from"
    assert run(caches, (*A, 7, 8, 5)) == KvUse(0, 0, 42)


def test_the_least_recently_used_makes_room(caches: KeptCaches) -> None:
    prompts = [(first, *A) for first in range(4)]
    assert [run(caches, prompt).cache for prompt in prompts[:3]] == [0, 1, 2]
    run(caches, prompts[0])
    assert run(caches, prompts[3]) == KvUse(1, 1, 0)
    assert run(caches, prompts[0]).num_cached == 40
    assert run(caches, prompts[1]).num_cached == 0


def test_one_cache_is_cut_however_small_the_part() -> None:
    caches = KeptCaches(KvLayout(1), None)
    run(caches, A)
    assert run(caches, (*A[:5], 1)) == KvUse(0, 0, 5)
    assert run(caches, A).num_cached == 5


def test_reuse_can_be_declined_and_what_was_prefilled_is_kept_all_the_same(caches: KeptCaches) -> None:
    run(caches, A)
    assert run(caches, A, reuse=False) == KvUse(1, 1, 0)
    assert run(caches, A).num_cached == 39


def test_what_a_cancelled_request_had_prefilled_counts(caches: KeptCaches) -> None:
    caches.give_back(A, 17, 17, caches.take(A, reuse=True).cache)
    assert run(caches, A).num_cached == 17


def test_after_a_fault_nothing_is_kept(caches: KeptCaches) -> None:
    run(caches, A)
    run(caches, A[::-1])
    caches.forget(caches.take(A, reuse=True).cache)
    assert [run(caches, prompt).num_cached for prompt in (A, A[::-1])] == [0, 0]


def test_ranks_without_caches_keep_nothing() -> None:
    caches = KeptCaches(KvLayout(0), None)
    assert [run(caches, A) for _ in range(2)] == [KvUse(), KvUse()]


@given(
    window=st.integers(2, 9), slack=st.integers(0, 6), first_length=st.integers(1, 40),
    continuations=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), max_size=3),
)  # fmt: skip
def test_the_rule_of_the_ring_is_exact(
    window: int, slack: int, first_length: int, continuations: list[tuple[int, int]]
) -> None:  # fmt: skip
    """A sequence that is cut back and continued several times, place by place as workers/phases/attend_cache.cuh keeps it."""
    ring_positions = window + slack
    caches = KeptCaches(KvLayout(1, ring_positions), window)
    places = [-1] * ring_positions  # the position that stands at each place

    def write(begin: int, end: int) -> bool:
        """Append positions; whether each of them found its whole window."""
        found = True
        for position in range(begin, end):
            seen = range(max(0, position - window + 1), position)
            found = found and all(places[p % ring_positions] == p for p in seen)
            places[position % ring_positions] = position
        return found

    assert write(0, first_length)
    length = num_written = first_length
    for num_back, num_more in continuations:
        begin = max(1, length - num_back)
        is_allowed = caches.is_intact(begin, num_written)
        assert write(begin, begin + num_more) == is_allowed
        if not is_allowed:
            return
        length = begin + num_more
        num_written = max(num_written, length)


@pytest.mark.parametrize(("ring_positions", "longest_step_back"), [(512, 1), (640, 129)])
def test_how_far_a_full_ring_allows_to_step_back(ring_positions: int, longest_step_back: int) -> None:
    """The window of Laneformer 2B, with no batch of slack and with one."""
    caches, num_written = KeptCaches(KvLayout(1, ring_positions), window=512), 3000
    assert caches.is_intact(num_written - longest_step_back, num_written)
    assert not caches.is_intact(num_written - longest_step_back - 1, num_written)


def test_a_ring_that_lost_the_beginning_is_not_used() -> None:
    caches = KeptCaches(KvLayout(1, ring_positions=16), window=16)
    run(caches, A)
    assert run(caches, (*A, 7, 8, 9)).num_cached == 42, "exactly behind its end"
    assert run(caches, (*A, 7, 1)).num_cached == 0, "positions 26 and 27 have taken the places of 10 and 11"
    run(caches, A[:10])
    assert run(caches, A[:5]).num_cached == 4, "nothing was overwritten yet"
    assert KeptCaches(KvLayout(1, 16), None).is_intact(1, 10**6), "no layer is windowed"


def test_nobody_copies_from_a_ring_that_a_running_request_writes() -> None:
    """It goes on while the copy is made; without a ring what it has stays."""
    for ring_positions, num_cached in ((16, 0), (0, 12)):
        caches = KeptCaches(KvLayout(2, ring_positions), window=16, parallel=2)
        first = caches.take(array("I", A[:13]), reuse=True, num_answer=30)
        caches.moved(first.cache, array("I", A[:12]))
        second = caches.take(array("I", (*A[:12], 8, 9)), reuse=True, num_answer=3)
        assert second.cache != first.cache
        assert second.num_cached == num_cached


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_the_common_beginning_of_two_sequences(left: list[int], right: list[int]) -> None:
    different = [place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
    assert num_common(array("I", left), array("I", right)) == min([len(left), len(right), *different])


def test_what_a_running_request_holds_so_far_is_copied(caches: KeptCaches) -> None:
    first = caches.take(A, reuse=True)
    assert caches.take(A, reuse=False) == KvUse(1, 1, 0), "each has a cache of its own"
    caches.moved(first.cache, array("I", A[:20]))
    caches.moved(1, array("I"))
    assert caches.take((*A, 1), reuse=True) == KvUse(2, 0, 20), "as far as it has come"
    with pytest.raises(AssertionError, match="has a cache"):
        caches.take(A, reuse=True)
    caches.give_back((*A, 7), 40, 40, first.cache)
    assert caches.take((*A, 7, 8), reuse=True) == KvUse(0, 0, 40), "once it has ended its cache goes on"


def test_a_fault_of_one_leaves_the_books_of_others_that_run(caches: KeptCaches) -> None:
    first, second = (caches.take(prompt, reuse=True) for prompt in (A, A[::-1]))
    caches.forget(first.cache)
    caches.give_back(A[::-1], 39, 39, second.cache)
    assert run(caches, A).num_cached == 0
    assert run(caches, A[::-1]).num_cached == 39
