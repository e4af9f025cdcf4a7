"""What is late stays late, but by as much as the machine is slow."""

from __future__ import annotations

import pytest

from tests import patience
from tests.patience import in_time, slowness


def test_a_machine_is_as_slow_as_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, worked = iter((10.0, 10.12)), iter((0.0, 0.01, 0.03))
    monkeypatch.setattr("tests.patience.time.perf_counter", lambda: next(wall))
    monkeypatch.setattr("tests.patience.time.thread_time", lambda: next(worked))
    assert slowness() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("took_s", "slow", "is_in_time"), [(0.9, 1.0, True), (1.0, 1.0, False), (3.9, 4.0, True), (4.1, 4.0, False)]
)
def test_limits_grow_with_it(monkeypatch: pytest.MonkeyPatch, took_s: float, slow: float, is_in_time: bool) -> None:
    monkeypatch.setattr(patience, "slowness", lambda: slow)
    assert in_time(took_s, 1.0) == is_in_time
