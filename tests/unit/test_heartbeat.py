"""Heartbeats of a rank that works on requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.wait import Deadline, WaitResult, wait
from kog_dist.workers.engines import heartbeat
from kog_dist.workers.engines.heartbeat import Heartbeat


@pytest.fixture
def control() -> Iterator[ControlPage]:
    page = ControlPage.create(1, 16)
    yield page
    page.close()


class Beats:
    """A heartbeat whose beats are counted."""

    def __init__(self, control: ControlPage, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60.0) -> None:
        monkeypatch.setattr(heartbeat, "PERIOD_S", 0.001)
        self.threads: list[int] = []
        monkeypatch.setattr(control, "beat", lambda rank: self.threads.append(threading.get_ident()))
        self.heartbeat = Heartbeat(control, 0, limit_s)

    def of_thread(self) -> set[int]:
        return set(self.threads) - {threading.get_ident()}

    def in_turns(self, count: int) -> int:
        """Beats of so many turns of the thread's loop, taken here."""
        self.threads.clear()
        turns = iter([False] * count + [True])
        self.heartbeat._closed = SimpleNamespace(wait=lambda _seconds: next(turns))  # type: ignore[assignment]
        self.heartbeat._beat()
        return len(self.threads)

    def await_one_of_the_thread(self) -> None:
        self.threads.clear()
        found = wait(lambda: bool(self.of_thread()), aborted=lambda: False, deadline=Deadline.after(10.0))
        assert found is WaitResult.OK


def test_one_thread_beats_during_each_request(control: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(control, monkeypatch)
    found = set()
    for _ in range(2):
        with beats.heartbeat:
            assert threading.get_ident() in beats.threads, "at once"
            beats.await_one_of_the_thread()
            found |= beats.of_thread()
    assert len(found) == 1
    beats.heartbeat.close()


def test_between_requests_the_page_is_left_alone(control: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(control, monkeypatch)
    assert beats.in_turns(5) == 0, "not entered yet"
    beats.heartbeat._is_entered = True
    assert beats.in_turns(5) == 5
    beats.heartbeat.__exit__(None, None, None)
    assert beats.in_turns(5) == 0


def test_a_step_that_never_ends_does_not_look_alive(control: ControlPage, monkeypatch: pytest.MonkeyPatch) -> None:
    beats = Beats(control, monkeypatch, limit_s=60.0)
    beats.heartbeat._is_entered = True
    beats.heartbeat._last_progress_s -= 61.0
    assert beats.in_turns(5) == 0
    beats.heartbeat.progress()
    assert beats.in_turns(5) == 5
