"""Forced tokens on their way: from the grammar process to rank 0, and from there to all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.forced import MOST_FORCED
from kog_dist.workers.engines import forced_drafts
from kog_dist.workers.engines.forced_drafts import ForcedDrafts, mailbox


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(2, 64, vocab_size=100)
    yield page
    page.close()


def test_what_is_said_of_an_epoch_is_read_of_that_alone(control: ControlPage) -> None:
    assert control.forced.get(1) is None
    control.forced.put(1, [5, 6, 2**31])
    assert control.forced.get(1) == [5, 6, 2**31]
    assert control.forced.get(2) is None
    control.forced.put(2, [])
    assert (control.forced.get(1), control.forced.get(2)) == (None, [])
    control.forced.put(3, range(100))
    assert control.forced.get(3) == [*range(MOST_FORCED)]
    control.masks.put(4, np.full(4, 0xFFFFFFFF, np.uint32))
    control.masks.put(5, np.full(4, 0xFFFFFFFF, np.uint32))
    assert control.forced.get(3) == [*range(MOST_FORCED)], "masks lie somewhere else"


def test_words_of_another_epoch_are_not_taken(control: ControlPage) -> None:
    """As when they are read while they are written."""
    control.forced.put(7, [1, 2, 3])
    other = control.forced._words.copy()
    control.forced.put(8, [4, 5, 6])
    control.forced._words[2] = other[2]
    assert control.forced.get(8) is None


class Between:
    """An exchange of two ranks in threads."""

    def __init__(self) -> None:
        self.barrier, self.rows = threading.Barrier(2, timeout=20.0), np.zeros((2, mailbox(1).length), np.float32)

    def of(self, rank: int) -> Any:
        def all_gather(mailbox: str, slot: int, epoch: int, values: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
            assert (mailbox, slot) == ("forced", 0)
            assert epoch >= 40
            self.rows[rank] = values
            self.barrier.wait()
            found = self.rows.copy()
            self.barrier.wait()
            return found

        return type("Comm", (), {"all_gather": staticmethod(all_gather)})


def test_all_ranks_are_told_what_rank_0_knows(control: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced_drafts, "_WAIT_S", 0.0)
    request, between = DecodeRequest((1, 2), 20, mask_epoch=40), Between()
    wanted = [[5, 6, 16_777_215], [], [7], []]
    told: dict[int, list[list[int]]] = {0: [], 1: []}

    def rank_0(index: int) -> None:
        if index != 3:  # of the last one nobody says anything
            control.forced.put(40 + index, wanted[index])

    def ask(rank: int) -> None:
        drafts = ForcedDrafts(request, control, cast(Any, between.of(rank)), rank)
        for index in range(len(wanted)):
            if rank == 0:
                rank_0(index)
            told[rank].append([*drafts.next(index)])

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert told[0] == told[1] == wanted


def test_a_rank_that_is_alone_asks_nobody(control: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced_drafts, "_WAIT_S", 0.0)
    drafts = ForcedDrafts(DecodeRequest((1, 2), 20, mask_epoch=9), control, None, 0)
    assert drafts.next(0) == []
    control.forced.put(9, [4, 4])
    assert drafts.next(0) == [4, 4]
