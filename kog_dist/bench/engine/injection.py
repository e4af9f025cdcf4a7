"""The fault plug-in: one fault to one process or file of an engine, from outside. Products have no hooks for it."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kog_dist.bench.engine.session import EngineSession, until
from kog_dist.errors import LaunchError
from kog_dist.records import dataclass

PAUSE_S = (0.1, 0.6)  # below the stall limit (1 s): no fault at all
DELAY_S = 1.0
_RUN_S, _REST_S = 0.004, 0.046  # of a delayed process: what a CPU quota of 8 % does
_FIND_S = 20.0


class FaultKind(enum.StrEnum):
    """What happens to a process, or to a file that it reads."""

    KILL = "kill"
    STOP = "stop"
    CONT = "cont"
    TERM = "term"
    PAUSE = "pause"  # STOP, and CONT after PAUSE_S
    DELAY = "delay"  # it runs for 8 % of DELAY_S
    ENOSPC = "enospc"  # nothing that it writes to files gets any longer
    SHORT_READ = "short read"  # the second half of a file is gone


class Point(enum.StrEnum):
    """When it happens."""

    LOAD = "load"
    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"
    DRAIN = "drain"


_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.STOP: signal.SIGSTOP,
    FaultKind.CONT: signal.SIGCONT,
    FaultKind.TERM: signal.SIGTERM,
}


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that has happened: to whom, and between which moments (time.monotonic())."""

    pid: int
    begin_s: float
    end_s: float


def find(session: EngineSession, role: str) -> int:
    """The process of `role` (see EngineSession.processes), which is waited for. Raises TimedOut if there is none."""
    found: dict[str, int] = {}

    def is_there() -> bool:
        found.update(session.processes())
        return role in found

    until(is_there, _FIND_S, lambda: f"there is no {role}: {session.processes()} {session.output()}")
    return found[role]


def fault(session: EngineSession, role: str, kind: FaultKind) -> Injected:
    """Do it to the process of `role`. Raises TimedOut and LaunchError if there is none."""
    return fault_of_process(find(session, role), kind, random.Random(1))


def fault_of_process(pid: int, kind: FaultKind, chance: random.Random) -> Injected:
    """The same to a process by its number. Raises LaunchError if it has ended."""
    begin_s = time.monotonic()
    try:
        _ACTS.get(kind, _send)(pid, kind, chance)
    except ProcessLookupError as error:
        raise LaunchError(f"process {pid} ended before its fault") from error
    return Injected(pid, begin_s, time.monotonic())


def short_read(path: Path) -> None:
    """Cut a file that somebody may be reading in half."""
    os.truncate(path, path.stat().st_size // 2)


def _send(pid: int, kind: FaultKind, chance: random.Random) -> None:
    os.kill(pid, _SIGNALS[kind])


def _pause(pid: int, kind: FaultKind, chance: random.Random) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(chance.uniform(*PAUSE_S))
    with contextlib.suppress(ProcessLookupError):  # an idle grammar runner that is stopped is replaced
        os.kill(pid, signal.SIGCONT)


def _delay(pid: int, kind: FaultKind, chance: random.Random) -> None:
    end_s = time.monotonic() + DELAY_S
    while time.monotonic() < end_s:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_REST_S)
        os.kill(pid, signal.SIGCONT)
        time.sleep(_RUN_S)


def _fill_disk(pid: int, kind: FaultKind, chance: random.Random) -> None:
    """Python ignores SIGXFSZ: a write fails with an OSError, as on a full disk. Sockets and pipes go on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))


_ACTS: dict[FaultKind, Callable[[int, FaultKind, random.Random], None]] = {
    FaultKind.PAUSE: _pause,
    FaultKind.DELAY: _delay,
    FaultKind.ENOSPC: _fill_disk,
}
