"""The definitions of the collectives, against an obvious scalar twin; and where mailboxes lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kog_dist.collectives import reference
from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.mailbox import fingerprint, place
from kog_dist.errors import PlanError


def slow_tree(values: list[np.float32]) -> np.float32:
    """Adjacent pairs, one scalar at a time."""
    if len(values) == 1:
        return values[0]
    pairs = [np.add(a, b) for a, b in zip(values[0::2], values[1::2], strict=False)]
    return slow_tree(pairs + values[len(pairs) * 2 :])


def rows_of(num_rows: int, seed: int) -> NDArray[np.float32]:
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-6, 6, (num_rows, 5))
    return (random.standard_normal((num_rows, 5)) * scale).astype(np.float32)


@given(st.integers(1, 17), st.integers(0, 1000))
def test_tree_sum_is_the_scalar_tree(num_rows: int, seed: int) -> None:
    rows = rows_of(num_rows, seed)
    expected = [slow_tree(list(rows[:, column])) for column in range(rows.shape[1])]
    assert reference.tree_sum(rows).tobytes() == np.array(expected, np.float32).tobytes()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_bits_do_not_depend_on_the_world_size(world_size: int) -> None:
    for seed in range(50):
        lanes = rows_of(8, seed)
        per_rank = lanes.reshape(world_size, 8 // world_size, -1)
        sums = [reference.tree_sum(rank_lanes) for rank_lanes in per_rank]
        assert reference.all_reduce(sums).tobytes() == reference.tree_sum(lanes).tobytes()


def test_tree_sum_keeps_its_input_and_special_values() -> None:
    rows = np.array([[np.inf, np.nan, -0.0], [-np.inf, 1.0, -0.0]], np.float32)
    before = rows.tobytes()
    with np.errstate(invalid="ignore"):
        total = reference.tree_sum(rows)
    assert np.isnan(total[:2]).all()
    assert np.signbit(total[2])
    assert rows.tobytes() == before
    with pytest.raises(ValueError, match="no rows"):
        reference.tree_sum(np.zeros((0, 3), np.float32))


def test_all_gather_keeps_the_order_of_ranks() -> None:
    values = [np.full(3, rank, np.float32) for rank in range(4)]
    assert reference.all_gather(values)[:, 0].tolist() == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 70)), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 8]))
def test_rows_of_mailboxes_do_not_overlap(sizes: list[tuple[int, int]], world_size: int) -> None:
    specs = [MailboxSpec(f"box{index}", *size) for index, size in enumerate(sizes)]
    end = 0
    for mailbox in place(specs, world_size):
        for slot in range(mailbox.spec.num_slots):
            for source in range(world_size):
                start = mailbox.row(slot, source)
                assert start == end
                assert start % 16 == 0, "rows of different writers share a cache line"
                end = start + mailbox.row_words
                assert mailbox.row_words >= mailbox.spec.length


def test_impossible_mailboxes_are_refused() -> None:
    for specs in ([MailboxSpec("a", 0, 1)], [MailboxSpec("a", 1, 0)], [MailboxSpec("a", 1, 1), MailboxSpec("a", 1, 1)]):
        with pytest.raises(PlanError, match="'a'"):
            place(specs, 2)


def test_fingerprint_tells_layouts_apart() -> None:
    box = [MailboxSpec("a", 1, 2)]
    others = [
        fingerprint(box, 2, 32), fingerprint(box, 4, 32), fingerprint(box, 2, 8), fingerprint([MailboxSpec("b", 1, 2)], 2, 32),
        fingerprint([MailboxSpec("a", 2, 2)], 2, 32), fingerprint([MailboxSpec("a", 1, 3)], 2, 32), fingerprint([], 2, 32),
    ]  # fmt: skip
    assert len(set(others)) == len(others)
    assert {len(found) for found in others} == {32}
