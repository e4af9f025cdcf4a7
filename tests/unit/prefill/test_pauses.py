"""Prefill stands still between the parts of a chunk, as long as others decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kog_dist.workers.prefill.base.chunks import Chunk, Work
from kog_dist.workers.prefill.prefill import Prefill, ended

CONTEXT, SIZE, PARTS = 128, 32, 3


class Recorder:
    """A runner whose parts end when they are asked about for the second time."""

    def __init__(self) -> None:
        self.log = list[str]()
        self.num_queued = 0

    def begin(self, token_ids: Sequence[int], start: int, held: int, cache: int = 0) -> None:
        self.log.append("begin")

    def queue(self, chunk: Chunk, part: int = 0) -> Callable[[], bool]:
        self.log.append(f"{chunk.start}.{part}")
        self.num_queued += 1
        asked = iter((False, True))

        def has_ended() -> bool:
            found = next(asked)
            self.num_queued -= found
            return found

        return has_ended

    def queue_end(self, chunk: Chunk) -> None:
        self.log.append("end")

    def store(self, first: int, last: int) -> None:
        self.log.append(f"store {first} {last}")

    def has_ended(self) -> bool:
        return True

    def finish(self) -> bool:
        return True

    def stop(self) -> None:
        self.log.append("stop")


def made() -> tuple[Prefill, Recorder]:
    runner = Recorder()
    work = Work(row_flop=1e12, most_parts=PARTS, max_context=CONTEXT)
    return Prefill(cast(Any, runner), max_context=CONTEXT, sizes=(16, SIZE), work=work), runner


ALL = ["begin", "0.0", "0.1", "0.2", "32.0", "32.1", "32.2", "end", "store 0 64"]


@pytest.mark.parametrize("paused", [0, 3, 100])
def test_it_stands_still_behind_each_part_as_long_as_it_is_to(paused: int) -> None:
    """With nothing queued; in the end it has done what it does without."""
    prefill, runner = made()
    num_pauses, held = 0, list[int]()
    steps = prefill.steps(range(64), 0, should_stop=lambda: False, on_progress=held.append, pauses=lambda: num_pauses < paused)
    for _ in steps:
        assert not runner.num_queued
        num_pauses += 1
        assert runner.log == ALL[: 1 + num_pauses]
    assert num_pauses == min(paused, 5)
    assert runner.log == ALL
    assert held == [32, 64]
    assert ended(made()[0].steps(range(64), 0, should_stop=lambda: False, pauses=lambda: True)) == 64


def test_a_stop_while_it_stands_still_counts() -> None:
    prefill, runner = made()
    is_over = False
    steps = prefill.steps(range(64), 0, should_stop=lambda: is_over, pauses=lambda: True)
    for _ in range(4):
        next(steps)
    is_over = True
    assert ended(steps) == 32
    assert runner.log == [*ALL[:5], "store 0 32"]
