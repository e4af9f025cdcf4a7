"""A child that is stopped is noticed, one that was continued is forgiven, and one that has ended is nobody's business here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kog_dist.system.stopped_child import STOPPED_S, StopWatch, is_stopped


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def strike(child: subprocess.Popen[bytes], signum: signal.Signals, wanted: int) -> None:
    child.send_signal(signum)
    os.waitid(os.P_PID, child.pid, wanted | os.WNOWAIT)


def test_it_is_lost_once_it_was_stopped_for_long_enough(child: subprocess.Popen[bytes]) -> None:
    now_s = 5.0
    watch = StopWatch(child.pid, lambda: now_s)
    assert not watch.is_lost()
    strike(child, signal.SIGSTOP, os.WSTOPPED)
    now_s += 100.0
    assert (watch.is_lost(), watch.is_stopped) == (False, True), "it may have been stopped just now"
    now_s += 0.9 * STOPPED_S
    assert not watch.is_lost()
    strike(child, signal.SIGCONT, os.WCONTINUED)
    assert (watch.is_lost(), watch.is_stopped) == (False, False)
    strike(child, signal.SIGSTOP, os.WSTOPPED)
    now_s += 1.0
    assert not watch.is_lost(), "that begins anew"
    now_s += STOPPED_S
    assert watch.is_lost()


def test_one_that_has_ended_is_not_stopped(child: subprocess.Popen[bytes]) -> None:
    strike(child, signal.SIGKILL, os.WEXITED)
    assert not is_stopped(child.pid)
    child.wait()
    assert not is_stopped(child.pid)
