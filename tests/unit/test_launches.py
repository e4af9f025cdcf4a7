"""The launches of one request: how many steps each has, and when the next one is queued."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.workers.cuda.draft_builds import PASS_TOKENS
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
