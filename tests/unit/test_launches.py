"""The launches of one request: how many steps each has, and when the next one is queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.workers.cuda.draft_builds import NOWHERE, PASS_TOKENS
from kog_dist.workers.cuda.kernel_shape import CHOICE_POSITIONS
from kog_dist.workers.engines.launches import Launches


class EndedAtOnce:
    """A kernel whose launches have ended when they are queued."""

    def __init__(self) -> None:
        self.steps = list[int]()
        self.stream = SimpleNamespace(record=lambda: SimpleNamespace(done=True))

    def launch(self, num_steps: int) -> None:
        self.steps.append(num_steps)


@pytest.mark.parametrize(("has_drafts", "steps"), [(False, [8, 3, 1, 1, 1]), (True, [1] * 14)])
def test_launches_with_a_check_have_no_more_positions_than_choices_are_kept_of(has_drafts: bool, steps: list[int]) -> None:
    """With drafts a launch is of both builds, whose passes have one token and several."""
    kernel: Any = EndedAtOnce()
    checks = list[int]()
    launches = Launches(kernel, 11, 3, one_by_one=False, check=lambda: checks.append(len(kernel.steps)), has_drafts=has_drafts)
    num_taken = 0
    while not launches.all_ended:
        launches.refill(num_taken)
        num_taken = min(num_taken + 1, 3) if len(kernel.steps) > len(steps) - 3 else 0
    assert kernel.steps == steps
    assert checks == list(range(1, len(steps) + 1)), "behind each launch, before the next one is queued"
    assert max(steps) * (1 + PASS_TOKENS if has_drafts else 1) <= CHOICE_POSITIONS


class EndsWhenTold:
    """A kernel whose launches end when `end` says so, one after the other."""

    def __init__(self) -> None:
        self.steps, self.num_ended = list[int](), 0
        self.stream = SimpleNamespace(record=self._record)

    def launch(self, num_steps: int) -> None:
        self.steps.append(num_steps)

    def _record(self) -> Any:
        number = len(self.steps)
        return _Ending(self, number)

    def end(self) -> None:
        self.num_ended += 1


class _Ending:
    def __init__(self, kernel: EndsWhenTold, number: int) -> None:
        self._kernel, self._number = kernel, number

    @property
    def done(self) -> bool:
        return self._kernel.num_ended >= self._number


@pytest.mark.parametrize(
    ("options", "most"), [({}, 256), ({"takes_turns": True}, 8), ({"takes_turns": True, "company_steps": 4}, 4)]
)
def test_nothing_is_queued_behind_a_stop_before_it_was_called_there(options: dict[str, Any], most: int) -> None:
    """And launches are as long as they may be, but for those that end at a stop and behind it."""
    kernel: Any = EndsWhenTold()
    stops, called = [70, 80, 100], list[tuple[int, int]]()
    launches = Launches(
        kernel, 100, 200, one_by_one=False, stops=stops, at_stop=lambda: called.append((sum(kernel.steps), kernel.num_ended)),
        **options,
    )  # fmt: skip
    while not launches.all_ended:
        queued = sum(kernel.steps)
        due = next((stop for stop in stops if stop not in [at for at, _ in called]), 10**9)
        assert queued <= due
        if kernel.num_ended < len(kernel.steps):
            kernel.end()
        launches.refill(0)
    assert [at for at, _ in called] == stops, "nothing was queued behind them yet"
    assert [sum(kernel.steps[:ended]) for _, ended in called] == stops, "all in front had ended"
    assert sum(kernel.steps) == 300
    assert max(kernel.steps) <= most
    assert len(kernel.steps) <= 300 / most + 2 * len(stops) + 2


def test_launches_that_nothing_ends_early_stay_short_where_others_may_come() -> None:
    """Also those behind as many as there would be with one token in each."""
    kernel: Any = EndedAtOnce()
    launches = Launches(kernel, 3, 40, one_by_one=False, has_drafts=True, takes_turns=True)
    for _ in range(20):
        launches.refill(0)
    assert max(kernel.steps) == 8
    assert len(kernel.steps) > 20


def test_a_stop_is_called_also_while_others_wait() -> None:
    kernel: Any = EndsWhenTold()
    called = list[int]()
    launches = Launches(kernel, 9, 5, one_by_one=False, stops=[4], at_stop=lambda: called.append(1))
    kernel.end()
    launches.refill(0, holds=True)
    assert (kernel.steps, called) == ([4], [1])
    launches.turn(0, 3)
    assert kernel.steps == [4, 3]


class DecodesToItsStop:
    """A kernel whose launches give a few positions each, and none behind where they are to stop."""

    def __init__(self, first_position: int, per_launch: int) -> None:
        self.position, self.per_launch, self.stops = first_position, per_launch, list[int]()
        self.stream = SimpleNamespace(record=lambda: SimpleNamespace(done=True))

    def launch(self, num_steps: int, *, stop_position: int = NOWHERE) -> None:
        self.stops.append(stop_position)
        self.position = min(self.position + self.per_launch, stop_position)

    def state(self) -> dict[str, int]:
        return {"position": self.position}


@pytest.mark.parametrize("per_launch", [1, 7, 400])
def test_launches_with_drafts_end_at_their_stops(per_launch: int) -> None:
    """However many tokens a pass gives: nobody but the kernel knows how far a launch comes."""
    kernel: Any = DecodesToItsStop(10, per_launch)
    reached = list[int]()
    launches = Launches(
        kernel, 40, 300, one_by_one=False, has_drafts=True, stops=[30, 64, 128], at_stop=lambda: reached.append(kernel.position),
        first_position=10,
    )  # fmt: skip
    while len(reached) < 3:
        assert kernel.position <= 10 + 128
        launches.refill(0)
    assert reached == [40, 74, 138]
    assert set(kernel.stops) - {NOWHERE} == set(reached)
    launches.refill(0)
    assert kernel.stops[-1] == NOWHERE
