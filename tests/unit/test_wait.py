"""The bounded wait and the futex: every wait ends, in the way it should, and looks where it should."""

from __future__ import annotations

import math
import os
import threading
import time

import numpy as np
import pytest

from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.wait import POLLS_PER_CHECK, Deadline, FutexWord, WaitResult, wait


class Counter:
    """Counts its calls and turns true at call number `at`."""

    def __init__(self, at: float = math.inf) -> None:
        self.at = at
        self.calls = 0

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls >= self.at


def never() -> bool:
    return False


@pytest.mark.parametrize("at", [1, 2, 63, 64, 65, 200, 300])
def test_ready_ends_the_wait_in_every_stage(at: int) -> None:
    ready = Counter(at)
    result = wait(ready, aborted=never, deadline=Deadline.after(30), spins=64, yields=100, sleep_s=1e-5)
    assert result is WaitResult.OK
    assert ready.calls == at


def test_ready_at_once_asks_for_nothing_else() -> None:
    aborted = Counter(1)
    assert wait(lambda: True, aborted=aborted, deadline=Deadline(0.0)) is WaitResult.OK
    assert aborted.calls == 0


def test_abort_is_seen_at_the_next_check_while_spinning() -> None:
    ready, aborted = Counter(), Counter(1)
    assert wait(ready, aborted=aborted, deadline=Deadline.never()) is WaitResult.ABORT
    assert ready.calls == POLLS_PER_CHECK


def test_abort_is_seen_at_every_poll_while_sleeping() -> None:
    ready, aborted = Counter(), Counter(3)
    assert wait(ready, aborted=aborted, deadline=Deadline.never(), spins=0, yields=0, sleep_s=1e-5) is WaitResult.ABORT
    assert ready.calls == 3


def test_timeout_asks_once_more() -> None:
    ready = Counter()
    assert wait(ready, aborted=never, deadline=Deadline(0.0)) is WaitResult.TIMEOUT
    assert ready.calls == POLLS_PER_CHECK + 1
    assert wait(Counter(POLLS_PER_CHECK + 1), aborted=never, deadline=Deadline(0.0)) is WaitResult.OK


def test_abort_goes_before_timeout() -> None:
    assert wait(never, aborted=lambda: True, deadline=Deadline(0.0)) is WaitResult.ABORT


def test_on_poll_is_called_at_every_check() -> None:
    beats: list[None] = []
    ready = Counter(10 * POLLS_PER_CHECK + 1)
    wait(ready, aborted=never, deadline=Deadline.never(), on_poll=lambda: beats.append(None))
    assert len(beats) == 10


def test_sleep_does_not_overrun_the_deadline() -> None:
    deadline = Deadline.after(0.01)
    assert wait(never, aborted=never, deadline=deadline, spins=0, yields=0, sleep_s=1e6) is WaitResult.TIMEOUT


def test_waits_give_the_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    yields = Counter()
    sleeps: list[float] = []
    monkeypatch.setattr(os, "sched_yield", yields)
    monkeypatch.setattr(time, "sleep", sleeps.append)
    wait(Counter(20), aborted=never, deadline=Deadline.never(), spins=5, yields=10, sleep_s=0.25)
    assert yields.calls == 10
    assert sleeps == [0.25] * 4


def test_deadline() -> None:
    assert Deadline.never().remaining_s() == math.inf
    assert not Deadline.never().expired()
    assert Deadline(0.0).expired()
    assert Deadline(0.0).remaining_s() == 0.0
    assert 99.0 < Deadline.after(100.0).remaining_s() <= 100.0


def test_futex_returns_when_the_word_differs_and_when_woken() -> None:
    segment = Segment.create("test", 64)
    word = [segment.array(np.uint32, 1, 16)]
    futex = FutexWord(segment.buffer, 16)
    futex.wait(7, 1000.0)  # the word is 0: returns at once
    futex.wait(0, 0.001)  # the word is 0: ends by its timeout
    woken = threading.Event()

    def waiter() -> None:
        while word[0][0] == 0:
            futex.wait(0, 1000.0)
        woken.set()

    thread = threading.Thread(target=waiter)
    thread.start()
    word[0][0] = 1
    while not woken.wait(0.001):  # the waiter may be about to sleep: a wake before that is lost, but then the word differs
        futex.wake()
    thread.join(10.0)
    assert not thread.is_alive()
    futex.close()
    futex.wait(0, 1000.0)  # closed: nothing to wait for
    futex.wake()
    word.clear()
    segment.close()
    assert segment.buffer.closed
