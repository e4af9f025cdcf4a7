"""Signs of life: what counts as silent, what never does, and what a process makes of a stop signal that nobody asked for."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.launch.liveness import HELD_UP_S, LOOP_STALL_FACTOR, Silence, Vigil, WatchedChild
from kog_dist.launch.local import Child
from kog_dist.launch.process import CoreUse
from kog_dist.launch.readiness_probe import ReadinessProbe
from kog_dist.rpc.listener import RpcListener
from kog_dist.rpc.messages import EngineState, Status, StatusReport
from kog_dist.rpc.transport import socket_address
from kog_dist.runtime.process_page import ProcessPage
from kog_dist.runtime.wait import Deadline, WaitResult, wait

STALL_S = 1.0
TICK_S = 0.05


class Watch:
    """A vigil over a process that a test stops and continues, by a clock that it turns."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self.now_s = 100.0
        self.is_stopped = False
        self.core_use = CoreUse(wants=False, had_s=7.0)  # while it loaded
        process: Any = SimpleNamespace(is_stopped=lambda: self.is_stopped, core_use=lambda: self.core_use)
        self.vigil = Vigil(process, stall_s, lambda: self.now_s)

    def look(self, after_s: float = TICK_S, beat_age_s: float = 0.0, beat_limit_s: float = math.inf) -> Silence | None:
        self.now_s += after_s
        return self.vigil.look(beat_age_s, beat_limit_s)

    def looks(self, seconds: float) -> list[Silence]:
        found = [self.look() for _ in range(round(seconds / TICK_S))]
        return [silence for silence in found if silence is not None]


def test_one_that_is_stopped_is_silent_after_the_limit_and_not_before() -> None:
    watch = Watch()
    assert watch.looks(3.0) == []
    watch.is_stopped = True
    assert watch.looks(STALL_S - TICK_S) == []
    [silence] = watch.looks(3 * TICK_S)[:1]
    assert silence.is_stopped
    assert STALL_S < silence.for_s <= STALL_S + 2 * TICK_S


def test_one_that_is_continued_in_time_starts_anew() -> None:
    watch = Watch()
    for _ in range(5):
        watch.is_stopped = True
        assert watch.looks(0.9) == []
        watch.is_stopped = False
        assert watch.look() is None


@pytest.mark.parametrize("stall_s", [0.5, 1.0, 30.0])
def test_what_a_launcher_misses_that_was_held_up_itself_counts_for_nobody(stall_s: float) -> None:
    guard_s = min(HELD_UP_S, stall_s / 2)
    watch = Watch(stall_s)
    watch.is_stopped = True
    assert watch.looks(0.9 * stall_s) == []
    assert watch.look(after_s=guard_s + 0.01) is None
    assert watch.look(TICK_S) is None, "the time before it counts, the gap does not"
    assert watch.looks(0.1 * stall_s + 2 * TICK_S)
    watch = Watch(stall_s)
    assert watch.look(guard_s + 0.01, beat_age_s=9.0 * stall_s, beat_limit_s=stall_s) is None
    silence = watch.look(TICK_S, beat_age_s=9.0 * stall_s, beat_limit_s=stall_s)
    assert silence is not None
    assert silence.for_s == pytest.approx(9.0 * stall_s - guard_s - 0.01)
    assert Watch(stall_s).look(guard_s - 0.01, beat_age_s=1.1 * stall_s, beat_limit_s=stall_s) is not None


def test_a_gap_is_no_silence_of_who_beats_either() -> None:
    """The machine stood still for longer than the limit. The launcher goes on first, and looks twice before anybody beats."""
    watch = Watch()
    assert watch.look(beat_age_s=0.1, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=3.0, beat_age_s=3.1, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.5, beat_age_s=3.6, beat_limit_s=STALL_S) is None, "held up again"
    assert watch.look(beat_age_s=3.65, beat_limit_s=STALL_S) is None, "0.1 s before the gaps, 0.05 s behind them"
    assert watch.look(after_s=0.3, beat_age_s=3.95, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.3, beat_age_s=4.25, beat_limit_s=STALL_S) is None
    silence = watch.look(after_s=0.3, beat_age_s=4.55, beat_limit_s=STALL_S)
    assert silence is not None, "it has not come back"
    assert silence.for_s == pytest.approx(1.05)
    assert watch.look(beat_age_s=0.01, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.3, beat_age_s=1.01, beat_limit_s=STALL_S) is not None, "gaps before the last beat do not count"


def test_of_a_gap_counts_what_is_behind_the_last_beat() -> None:
    watch = Watch()
    assert watch.look(after_s=3.0, beat_age_s=0.2, beat_limit_s=STALL_S) is None, "only the launcher was held up"
    assert watch.look(after_s=0.3, beat_age_s=0.5, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.3, beat_age_s=0.8, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.39, beat_age_s=1.19, beat_limit_s=STALL_S) is None
    assert watch.look(after_s=0.03, beat_age_s=1.22, beat_limit_s=STALL_S) is not None


def test_a_loop_is_silent_beyond_its_limit() -> None:
    watch = Watch()
    assert watch.look(beat_age_s=5.0, beat_limit_s=5.0) is None
    assert watch.look(beat_age_s=5.01, beat_limit_s=5.0) == Silence(5.01, is_stopped=False)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_who_waits_for_a_core_is_silent_for_the_time_that_it_had_one(share: float) -> None:
    """Beside others it gets a share of a core, in steps of 10 ms, as the system counts."""
    watch, age_s, silence = Watch(), 0.0, None
    while silence is None:
        age_s += TICK_S
        watch.core_use = CoreUse(wants=True, had_s=7.0 + round(share * age_s, 2))
        silence = watch.look(beat_age_s=age_s, beat_limit_s=STALL_S)
        assert age_s < 1.2 * STALL_S / share
    assert silence.for_s == pytest.approx(share * age_s, abs=0.011)
    assert silence.for_s < 1.1 * STALL_S


def test_who_gets_no_core_at_all_is_not_silent() -> None:
    watch = Watch()
    watch.core_use = CoreUse(wants=True, had_s=7.0)
    assert not any(watch.look(beat_age_s=look * TICK_S, beat_limit_s=STALL_S) for look in range(1, 400))


def test_only_waits_behind_the_last_beat_count() -> None:
    watch = Watch()
    watch.core_use = CoreUse(wants=True, had_s=7.0)
    assert not any(watch.look(beat_age_s=look * TICK_S, beat_limit_s=STALL_S) for look in range(1, 100))
    watch.core_use = CoreUse(wants=False, had_s=7.0)
    silent = [watch.look(beat_age_s=look * TICK_S, beat_limit_s=STALL_S) is not None for look in range(1, 25)]
    assert silent.index(True) == STALL_S / TICK_S


def test_who_sleeps_waits_for_nothing() -> None:
    watch = Watch()
    ages = [look * TICK_S for look in range(1, 30)]
    found = [age_s for age_s in ages if watch.look(beat_age_s=age_s, beat_limit_s=STALL_S)]
    assert found[0] == pytest.approx(STALL_S + TICK_S)


def test_what_is_said() -> None:
    assert str(Silence(1.234, is_stopped=False)) == "gave no sign of life for 1.23 s"
    assert str(Silence(1.0, is_stopped=True)) == "gave no sign of life for 1.00 s (it was stopped, by SIGSTOP or a debugger)"


# ---- real processes ----
_PROGRAM = """
import signal, sys, time
from kog_dist.runtime.process_page import ProcessPage
page = ProcessPage.from_fd(int(sys.argv[1]))
assert page is not None
def stop(signum, frame):
    page.obey(signum)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    page.beat()
    time.sleep(float(sys.argv[2]))
"""


def start(pause_s: float, stall_s: float = 60.0, program: str = _PROGRAM) -> WatchedChild:
    def spawn(page: ProcessPage) -> Child:
        command = [sys.executable, "-c", program, str(page.fd), str(pause_s)]
        process = subprocess.Popen(command, pass_fds=(page.fd,), process_group=0)
        return Child("router", process, -1, None)

    return WatchedChild(spawn, stall_s)


def until(condition: Any) -> None:
    assert wait(condition, aborted=lambda: False, deadline=Deadline.after(20.0), sleep_s=0.01) is WaitResult.OK


@pytest.fixture
def child() -> Iterator[WatchedChild]:
    made = start(0.01)
    until(lambda: made._page.beat_age_s() > 0)
    yield made
    made.kill()


def test_a_signal_that_the_launcher_has_not_sent_kills(child: WatchedChild) -> None:
    os.kill(child.child.pid, signal.SIGTERM)
    until(lambda: child.child.exit_code is not None)
    assert child.child.exit_code == -signal.SIGTERM
    assert child.how_it_ended() == "was killed by SIGTERM"


def test_a_signal_of_the_launcher_stops(child: WatchedChild) -> None:
    child.begin_stop()
    until(lambda: child.child.exit_code is not None)
    assert child.child.exit_code == 0


def test_the_system_says_who_is_stopped(child: WatchedChild) -> None:
    assert not child.child.is_stopped()
    os.kill(child.child.pid, signal.SIGSTOP)
    until(child.child.is_stopped)
    assert not child.look(), "not for long enough"
    os.kill(child.child.pid, signal.SIGCONT)
    until(lambda: not child.child.is_stopped())
    assert not child.look()


def test_the_system_says_who_wants_a_core() -> None:
    sleeper = start(600.0)
    until(lambda: sleeper._page.beat_age_s() > 0 and not sleeper.child.core_use().wants)
    sleeper.kill()
    assert sleeper.child.core_use() == CoreUse(wants=False, had_s=0.0), "it is gone"
    busy = start(-1.0, program=_PROGRAM.replace("time.sleep", "abs"))
    until(lambda: busy.child.core_use().wants)
    before = busy.child.core_use().had_s
    until(lambda: busy.child.core_use().had_s > before)
    busy.kill()


@pytest.mark.parametrize("stops", [True, False])
def test_a_silent_child_is_killed(stops: bool) -> None:
    """One that is stopped, and one whose loop hangs."""
    made = start(0.01 if stops else 600.0, stall_s=0.5)
    until(lambda: made._page.beat_age_s() > 0)
    if stops:
        os.kill(made.child.pid, signal.SIGSTOP)
    until(made.look)
    assert made.silence is not None
    assert made.silence.is_stopped is stops
    assert made.silence.for_s > (0.5 if stops else LOOP_STALL_FACTOR * 0.5)
    until(lambda: made.child.exit_code is not None)
    assert not made.look(), "it is said once"
    assert made.how_it_ended() == f"{made.silence} and was killed"
    made.kill()
    assert not made.child.is_stopped(), "nor is one that is gone"


# ---- readiness ----
def test_ready_is_what_the_coordinator_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "i"
    folder.mkdir(mode=0o700)
    probe = ReadinessProbe(socket_address(folder))
    assert not probe.is_ready(), "there is no socket file"
    listener = RpcListener(folder)
    assert not probe.is_ready(), "nobody serves the socket file"
    states = [EngineState.LOADING, EngineState.READY]

    def answer() -> bool:
        """A turn of the coordinator."""
        for peer, message in listener.receive(16):
            assert isinstance(message, Status)
            listener.send(peer, report(states.pop(0)))
        listener.flush()
        return probe.is_ready()

    until(lambda: answer() or not states)
    until(probe.is_ready)
    assert states == []
    listener.close()
    assert probe.is_ready(), "it is asked once"
    probe.close()


def test_a_coordinator_that_dies_while_it_is_asked_is_not_ready(tmp_path: Path) -> None:
    folder = tmp_path / "i"
    folder.mkdir(mode=0o700)
    listener = RpcListener(folder)
    probe = ReadinessProbe(socket_address(folder))
    assert not probe.is_ready()
    listener.close()
    assert not probe.is_ready()
    assert not probe.is_ready(), "and nobody is there to be asked again"


def report(state: EngineState) -> StatusReport:
    return StatusReport(state, "i", "demo", "b", 1, 1, (), (), 1.0, None, (), 4, 0, 0, 0, 0, 0, 0, 0)
