"""When the next token is likely."""

from __future__ import annotations

import math

from kog_dist.runtime.pace import LONGEST_GAP_S, Pace


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def paced(*moments_s: float) -> tuple[Pace, Clock]:
    clock = Clock()
    pace = Pace(clock)
    for clock.now_s in moments_s:
        pace.token()
    return pace, clock


def test_nothing_is_likely_before_two_tokens_are_there() -> None:
    assert Pace(Clock()).until_near_s() == math.inf
    assert paced(5.0)[0].until_near_s() == math.inf


def test_a_token_is_likely_a_gap_after_the_last_one() -> None:
    pace, clock = paced(1.0, 1.0003)
    assert 0.0002 < pace.until_near_s() < 0.0003
    clock.now_s = 1.0006
    assert pace.until_near_s() <= 0
    clock.now_s = 1.002  # overdue: nobody looks for ever
    assert pace.until_near_s() == math.inf


def test_a_late_token_does_not_change_much() -> None:
    pace, clock = paced(1.0, 1.0003, 1.0050)
    clock.now_s = 1.0053
    assert pace.until_near_s() <= 0


def test_slow_tokens_are_slept_for() -> None:
    assert paced(1.0, 1.0 + 2 * LONGEST_GAP_S)[0].until_near_s() == math.inf
