"""When the coordinator says by itself that a rank is lost: on a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.runtime import wait
from kog_dist.runtime.control import RankState
from kog_dist.workers.coordinator import watch as coordinator_watch
from kog_dist.workers.coordinator.watch import LAUNCHER_GRACE_S, SILENT_S, RankWatch


class Ranks:
    """What the control page says of two ranks."""

    world_size = 2

    def __init__(self) -> None:
        self.states = [RankState.READY, RankState.RUNNING]
        self.ages_s = [0.0, 0.0]

    def state(self, rank: int) -> RankState:
        return self.states[rank]

    def beat_age_s(self, rank: int) -> float:
        return self.ages_s[rank]


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (coordinator_watch, wait):
        monkeypatch.setattr(module, "time", found)
    return found


def looked(watch: RankWatch, clock: Clock, after_s: float) -> str | None:
    clock.now_s += after_s
    return watch.look()


def test_a_launcher_has_its_time_to_act_on_a_rank_that_failed(clock: Clock) -> None:
    ranks: Any = Ranks()
    watch = RankWatch(ranks, 1)
    assert watch.look() is None
    ranks.states[1] = RankState.FAILED
    assert watch.has_failed_rank()
    assert looked(watch, clock, 0.01) is None, "it does not look so soon again"
    assert looked(watch, clock, 1.0) is None
    assert looked(watch, clock, LAUNCHER_GRACE_S - 0.1) is None
    said = looked(watch, clock, 0.2)
    assert said == "rank 1 failed and the launcher did not act on it; stop the engine and start it again"
    assert looked(watch, clock, 0.01) == said
    ranks.states[1] = RankState.READY
    assert not watch.has_failed_rank()
    assert looked(watch, clock, 1.0) is None, "it was acted on"
    ranks.states[0] = RankState.FAILED
    assert looked(watch, clock, 1.0) is None, "the next one has all of the time again"
    assert looked(watch, clock, LAUNCHER_GRACE_S - 0.1) is None


@pytest.mark.parametrize("state", RankState)
@pytest.mark.parametrize(("age_s", "is_stopped"), [(SILENT_S + 0.5, True), (SILENT_S + 0.5, False), (SILENT_S, True)])
def test_a_silent_rank_is_lost_only_while_the_launcher_is_stopped(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, state: RankState, age_s: float, is_stopped: bool
) -> None:
    ranks: Any = Ranks()
    ranks.states[0], ranks.ages_s = state, [age_s, 0.0]
    text = "7 (kog launch) T) T 1 2" if is_stopped else "7 (T) S 1 2"
    monkeypatch.setattr(coordinator_watch, "Path", lambda path: SimpleNamespace(read_text=lambda **_: text))
    watch = RankWatch(ranks, 7)
    watch.look()
    said = looked(watch, clock, LAUNCHER_GRACE_S + 0.1)
    if state is RankState.FAILED:
        assert said is not None
        assert "rank 0 failed" in said
    elif state in (RankState.READY, RankState.RUNNING) and is_stopped and age_s > SILENT_S:
        assert said is not None
        assert "rank 0 has given no sign of life for 1.5 s and the launcher (pid 7) is itself stopped" in said
    else:
        assert said is None
