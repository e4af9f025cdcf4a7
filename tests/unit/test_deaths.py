"""Who is to blame when processes of an engine have ended, and with which code the launcher ends then."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from kog_dist.launch.deaths import Deaths
from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_OK, EXIT_RANK_DIED, EXIT_TIMEOUT
from kog_dist.runtime.control import COORDINATOR, AbortCause


@dataclass
class Child:
    """A process as the launcher sees it."""

    role: str
    exit_code: int | None = None
    said: str = ""
    pid: int = 7

    @property
    def rank(self) -> int | None:
        return int(self.role.split()[1]) if self.role.startswith("rank") else None

    def read_output(self) -> bool:
        return False

    def last_line(self) -> str:
        return self.said

    def how_it_ended(self) -> str:
        return f"ended with {self.exit_code}"


class Engine:
    def __init__(self, *children: Child, request: object = None) -> None:
        self.children, self.request, self.world_size = children, request, 2
        self.aborts: list[tuple[AbortCause, int]] = []

    def abort(self, cause: AbortCause, rank: int) -> None:
        self.aborts.append((cause, rank))


def deaths(engine: Engine, *, was_ready: bool) -> Deaths:
    return Deaths(cast(EngineProcesses, engine), 6.0, lambda: was_ready)


KILLED = -signal.SIGKILL


@pytest.mark.parametrize(
    ("child", "was_ready", "code", "why", "sentence"),
    [
        (Child("coordinator", EXIT_OK), True, EXIT_OK, "drained", None),
        (Child("coordinator", EXIT_TIMEOUT), True, EXIT_TIMEOUT, "drain_timeout", "did not finish within 6 s"),
        (Child("coordinator", EXIT_TIMEOUT, "coordinator: no"), False, EXIT_CANNOT_START, "startup_failed", "not start: no"),
        (Child("coordinator", KILLED), True, EXIT_RANK_DIED, "coordinator_died", "while serving; the engine was stopped"),
        (Child("coordinator", KILLED), False, EXIT_CANNOT_START, "startup_failed", "during start-up (2 ranks stopped because of"),
        (Child("rank 1", 70, "rank 1: bad"), True, EXIT_RANK_DIED, "rank_died", "while serving: bad; the engine was stopped"),
        (Child("rank 1", 70, "rank 1: bad"), False, EXIT_CANNOT_START, "startup_failed", "rank 1 could not start: bad (1 rank s"),
        (Child("rank 0", KILLED, "noise"), True, EXIT_RANK_DIED, "rank_died", "ended with -9 while serving; the"),
        (Child("rank 0", KILLED, "noise"), False, EXIT_CANNOT_START, "startup_failed", "rank 0 (pid 7) ended with -9 during"),
    ],
)  # fmt: skip
def test_what_an_end_means(child: Child, was_ready: bool, code: int, why: str, sentence: str | None) -> None:
    engine = Engine(Child("rank 0"), Child("rank 1"), child)
    found = deaths(engine, was_ready=was_ready).first()
    assert found is not None
    assert (found.exit_code, found.reason) == (code, why)
    assert sentence is None or sentence in str(found.sentence)
    is_drain = why in ("drained", "drain_timeout")
    assert [rank for _, rank in engine.aborts] == ([] if is_drain else [COORDINATOR if child.rank is None else child.rank])


def test_what_was_killed_is_blamed_before_what_ended_by_itself() -> None:
    engine = Engine(Child("rank 0", 70, "rank 0: lost its peer"), Child("rank 1", KILLED), Child("client", 1))
    found = deaths(engine, was_ready=True).first()
    assert found is not None
    assert found.rank == 1


def test_nobody_is_to_blame_while_all_live() -> None:
    assert deaths(Engine(Child("rank 0"), Child("coordinator")), was_ready=True).first() is None


@pytest.mark.parametrize(
    ("child", "is_told"), [(Child("rank 0", KILLED), True), (Child("rank 0", 70), False), (Child("client", KILLED), False)]
)
def test_by_signal_is_a_death_that_others_follow(child: Child, is_told: bool) -> None:
    assert (deaths(Engine(child), was_ready=True).by_signal() is not None) is is_told


def test_a_drain_by_somebody_is_not_the_end_of_a_request_of_the_launcher() -> None:
    engine = Engine(Child("coordinator", EXIT_OK), request=cast(Any, object()))
    assert deaths(engine, was_ready=True).first() is None


class Talkative(Child):
    """Ends once somebody has read what it says: a pipe holds no more."""

    def read_output(self) -> bool:
        self.exit_code = 0
        return True

    def is_stopped(self) -> bool:
        return False

    def send(self, signum: int) -> None:
        assert signum != signal.SIGKILL, "nobody has read what it says"

    def close(self) -> None:
        pass


def test_children_that_say_much_when_they_end_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kog_dist.launch.engine.TERM_GRACE_S", 0.05)
    engine = EngineProcesses.__new__(EngineProcesses)
    child: Any = Talkative("rank 0")
    engine.children = [child]
    engine.control, engine._probe, engine._rendezvous, engine._gpu_leases, engine._lease, engine._reaper = (
        MagicMock() for _ in range(6)
    )
    monkeypatch.setattr(EngineProcesses, "_wait_for_exits", lambda self: None)
    engine.stop(None)
    assert child.exit_code == 0
