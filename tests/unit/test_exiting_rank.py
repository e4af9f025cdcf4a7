"""A rank that is ending: its peers and clients are told before the system says how it ended, and nobody else is blamed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.launch import supervisor
from kog_dist.launch.liveness import Vigil
from kog_dist.launch.local import Child
from kog_dist.launch.process import CoreUse, EngineProcess
from kog_dist.launch.supervisor import Supervisor
from kog_dist.runtime.control import COORDINATOR, NO_RANK, AbortCause, RankState
from kog_dist.runtime.startup import StartReport, StartStage
from kog_dist.runtime.wait import Deadline


def test_a_process_is_exiting_from_the_kill_until_it_is_reaped() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child = Child("rank 0", process, -1, None)
    assert not child.is_exiting()
    process.kill()
    assert select.select([child.pidfd], [], [], 20)[0], "it does not end"
    assert child.is_exiting(), "it has ended, and nobody has asked how"
    assert child.exit_code == -signal.SIGKILL
    assert not child.is_exiting()
    child.close()
    assert not child.is_exiting()
    assert process.stdin is not None
    process.stdin.close()


class FakeRank(EngineProcess):
    """Runs until a test says otherwise."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank}", 1000 + rank, ended_fd=-1, stderr_fd=-1, log=None)
        self.code: int | None = None
        self.exiting = self.stopped = False
        self.signals: list[int] = []

    @property
    def exit_code(self) -> int | None:
        return self.code

    @property
    def pidfd(self) -> int:
        return -1

    def is_exiting(self) -> bool:
        return self.exiting and self.code is None

    def core_use(self) -> CoreUse:
        return CoreUse(wants=False, had_s=0.0)

    def is_stopped(self) -> bool:
        return self.stopped

    def send(self, signum: int) -> None:
        self.signals.append(signum)


class Run:
    """A supervisor of four fake ranks that serve. `aborts`: what they were told, and for whom."""

    def __init__(self) -> None:
        self.ranks = [FakeRank(rank) for rank in range(4)]
        self.aborts: list[tuple[AbortCause, int]] = []
        self.control: Any = SimpleNamespace(
            abort_requests=list, beat_age_s=lambda rank: 0.0, state=lambda rank: RankState.RUNNING, world_size=4,
            startup=lambda rank: StartReport(StartStage.WEIGHTS),
        )  # fmt: skip
        engine: Any = SimpleNamespace(
            ranks=SimpleNamespace(origin="", is_killed_soon=False), children=self.ranks, control=self.control, world_size=4,
            request=None, mend_reaper=lambda: None, is_ready=lambda: True, rank_pid=lambda rank: 1000 + rank,
            loss_of_instance=lambda was_ready: None,
            abort=lambda cause, rank=NO_RANK: self.aborts.append((cause, rank)),
        )  # fmt: skip
        signals: Any = SimpleNamespace(count=0)
        self.signals = signals
        events: Any = SimpleNamespace(say=print, say_end=print, note=print)
        self.supervisor = Supervisor(LaunchConfig(), engine, signals, events)
        self.supervisor.is_ready = True
        self.supervisor._vigils = [Vigil(rank, 1.0) for rank in self.ranks]

    def decide(self) -> Any:
        return self.supervisor._decide(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "how"), [(-9, "was killed by SIGKILL"), (70, "stopped with exit code 70")])
def test_others_are_told_at_once_and_the_right_one_is_blamed(code: int, how: str) -> None:
    run = Run()
    assert run.decide() is None
    assert run.aborts == []
    run.ranks[2].exiting = True
    assert run.decide() is None
    assert run.aborts == [(AbortCause.RANK_DIED, 2)]
    run.ranks[0].code = 70  # it leaves because of the abort, and is gone earlier
    assert run.decide() is None
    run.ranks[2].code = code
    outcome = run.decide()
    assert outcome.sentence == f"rank 2 (pid 1002) {how} while serving; the engine was stopped"
    assert (outcome.exit_code, outcome.rank, outcome.reason) == (4, 2, "rank_died")


def test_who_was_killed_meanwhile_is_no_consequence() -> None:
    run = Run()
    run.ranks[1].exiting = True
    assert run.decide() is None
    run.ranks[3].code, run.ranks[1].code = -9, 70
    assert "rank 3 (pid 1003) was killed by SIGKILL" in run.decide().sentence


def test_causes_come_before_consequences() -> None:
    """A rank that gave up waiting has said for whom; and ranks whose starter is gone end with it."""
    run = Run()
    run.ranks[1].exiting = True
    assert run.decide() is None
    run.control.abort_requests = lambda: [(1, "rank 1 waited for rank 2")]
    run.ranks[1].code = 71
    outcome = run.decide()
    assert (outcome.reason, outcome.sentence) == ("requested_by_rank", "rank 1 waited for rank 2; the engine was stopped")
    run = Run()
    run.ranks[1].exiting = True
    assert run.decide() is None
    run.supervisor._lost_lifeline, run.ranks[1].code = "mpirun (pid 9)", -9
    assert run.decide().sentence == "mpirun (pid 9) is gone, which had started the ranks; so they stopped"


def test_a_rank_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "EXITING_S", 0.0)
    run = Run()
    run.ranks[1].exiting = True
    assert run.decide() is None
    outcome = run.decide()
    assert (outcome.exit_code, outcome.rank) == (4, 1)
    assert outcome.sentence.startswith("rank 1 (pid 1001) has been ending for 0 s while serving, and how is not known yet")
    assert outcome.sentence.endswith("; the engine was stopped")


@pytest.mark.parametrize(("num_signals", "is_killed_soon", "is_told"), [(1, False, True), (2, False, False), (1, True, False)])
def test_a_drain_waits_for_nobody_who_has_gone(num_signals: int, is_killed_soon: bool, is_told: bool) -> None:
    """Unless a second signal, or mpirun, ends everything: ranks may be ending with it."""
    run = Run()
    run.signals.count = num_signals
    run.supervisor._engine.ranks.is_killed_soon = is_killed_soon
    run.ranks[2].exiting = True
    assert run.supervisor._has_exiting_rank() is is_told
    assert run.aborts == ([(AbortCause.RANK_DIED, 2)] if is_told else [])


def test_start_up_has_its_own_words() -> None:
    run = Run()
    run.supervisor.is_ready = False
    run.ranks[1].exiting = True
    assert not run.supervisor._has_exiting_rank()
    assert run.aborts == []


@pytest.mark.parametrize(("state", "limit_s"), [(RankState.RUNNING, 1.0), (RankState.FAILED, 3.0)])
def test_a_rank_that_hangs_is_found_also_while_it_leaves(state: RankState, limit_s: float) -> None:
    run = Run()
    run.control.state = lambda rank: state if rank == 3 else RankState.STOPPED
    for age_s in (limit_s - 0.1, limit_s + 0.1):
        run.control.beat_age_s = {0: 9.0, 1: 9.0, 2: 9.0, 3: age_s, COORDINATOR: 0.0}.__getitem__
        outcome = run.supervisor._stalled()
        assert (outcome and (outcome.reason, outcome.rank)) == (("rank_stalled", 3) if age_s > limit_s else None)
        assert run.ranks[3].signals == ([signal.SIGKILL] if outcome else [])
    assert run.aborts == [(AbortCause.RANK_STALLED, 3)]
    assert outcome is not None
    assert outcome.sentence == f"rank 3 (pid 1003) gave no sign of life for {limit_s + 0.1:.2f} s; the engine was stopped"


def test_a_start_that_takes_too_long_names_the_rank_on_which_others_wait() -> None:
    run = Run()
    run.control.state = lambda rank: RankState.LOADING if rank == 2 else RankState.LINKING
    outcome = run.supervisor._startup(Deadline(0.0))
    assert outcome is not None
    assert (outcome.rank, run.aborts) == (2, [(AbortCause.STARTUP_FAILED, 2)])
    assert "rank 2 is still loading and packing weights, 3 more not ready" in str(outcome.sentence)


@pytest.mark.parametrize(
    ("is_ready", "cause", "exit_code"), [(True, AbortCause.INSTANCE_LOST, 4), (False, AbortCause.STARTUP_FAILED, 3)]
)
def test_an_engine_that_no_client_could_find_ends_unless_it_drains(is_ready: bool, cause: AbortCause, exit_code: int) -> None:
    run = Run()
    run.supervisor.is_ready = is_ready
    run.supervisor._engine.is_ready = lambda: is_ready  # type: ignore[method-assign]
    asked: list[bool] = []

    def loss(was_ready: bool) -> str:
        asked.append(was_ready)
        return "its folder was removed"

    run.supervisor._engine.loss_of_instance = loss  # type: ignore[method-assign]
    outcome = run.decide()
    assert (outcome.exit_code, outcome.reason, outcome.sentence) == (exit_code, "instance_lost", "its folder was removed")
    assert (run.aborts, asked) == ([(cause, NO_RANK)], [is_ready])
    run.aborts.clear()
    run.supervisor._drain_deadline = Deadline.after(60.0)
    run.signals.count = 1
    assert run.supervisor._instance_lost() is None
    assert run.aborts == []


def test_pids_of_other_processes_are_not_taken_for_the_ranks() -> None:
    read_fd, write_fd = os.pipe()  # no pidfd: it says no pid
    child = Child.__new__(Child)
    child.ended_fd, child._stat_fd = read_fd, -1
    assert not child.is_exiting()
    os.close(read_fd)
    os.close(write_fd)


@pytest.mark.parametrize("stat", [b"", b"7 (python) S 1 7", b"7 (python) S 1 7 7 0 -1 ? 0", b"7 (a) R) S 1 7 7 0 -1 0 0 0"])
def test_a_system_that_does_not_tell_flags_costs_the_early_notice_only(tmp_path: Path, stat: bytes) -> None:
    (tmp_path / "stat").write_bytes(stat)
    child = Child.__new__(Child)
    child._stat_fd = os.open(tmp_path / "stat", os.O_RDONLY)
    assert not child.is_exiting()
    os.close(child._stat_fd)
