"""After which ends a service starts its engine again, and what is said of each."""

from __future__ import annotations

from typing import cast

import pytest

from kog_dist.launch.events import EventLog
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_RANK_DIED, EXIT_TIMEOUT, Outcome
from kog_dist.launch.restarts import MAX_RESTARTS, RestartBudget
from kog_dist.launch.supervisor import tell_end


class Said:
    """The lines of an event log."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, *, error: bool = False) -> None:
        self.lines.append(text)

    def say_end(self, sentence: str) -> None:
        self.lines.append(sentence)

    def note(self, text: str) -> None:
        self.lines.append(f"({text})")


def told(
    reason: str, code: int = EXIT_RANK_DIED, *, generation: int = 1, may_go_on: bool = True, has_service: bool = True
) -> tuple[bool, list[str]]:  # fmt: skip
    said, restarts = Said(), RestartBudget() if has_service else None
    outcome = Outcome(code, reason, "rank 1 was killed")
    _, goes_on = tell_end(outcome, cast(EventLog, said), restarts, generation, may_go_on=may_go_on)
    return goes_on, said.lines


@pytest.mark.parametrize("reason", ["rank_died", "requested_by_rank", "coordinator_died", "instance_lost", "rank_stalled"])
def test_a_loss_is_followed_by_another_generation(reason: str) -> None:
    assert told(reason) == (True, ["rank 1 was killed; starting it again as generation 2"])
    assert told(reason, generation=3) == (True, ["rank 1 was killed; starting it again as generation 4"])


@pytest.mark.parametrize("reason", ["gateway_died", "drained", "stopped_by_sigterm", "drain_timeout", "starter_lost", "answered"])
def test_other_ends_are_ends(reason: str) -> None:
    assert told(reason) == (False, ["rank 1 was killed"])


def test_who_has_no_service_or_is_told_to_stop_keeps_the_end() -> None:
    for ends in ({"has_service": False}, {"may_go_on": False}):
        assert told("rank_died", **ends) == (False, ["rank 1 was killed"])


@pytest.mark.parametrize("reason", ["startup_failed", "startup_timeout", "cannot_start"])
def test_a_start_that_fails_is_tried_again_only_after_a_loss(reason: str) -> None:
    assert not told(reason, EXIT_CANNOT_START)[0]
    assert told(reason, EXIT_CANNOT_START, generation=2)[0]


@pytest.mark.parametrize("code", [EXIT_CANNOT_START, EXIT_RANK_DIED, EXIT_TIMEOUT])
def test_after_three_times_it_ends_with_the_code_of_a_death(code: int) -> None:
    said, restarts = Said(), RestartBudget()
    for generation in range(1, MAX_RESTARTS + 1):
        assert tell_end(Outcome(code, "rank_died", "x"), cast(EventLog, said), restarts, generation, may_go_on=True)[1]
    ended, goes_on = tell_end(Outcome(code, "rank_stalled", "x", rank=1), cast(EventLog, said), restarts, 4, may_go_on=True)
    assert (goes_on, ended.exit_code, ended.reason, ended.rank) == (False, EXIT_RANK_DIED, "rank_stalled", 1)
    assert said.lines[-1] == "x; it is not started again after 3 restarts in 10 min"
