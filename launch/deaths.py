"""How processes of an engine end without having been told to, and who is to blame when several have ended."""

from __future__ import annotations

from collections.abc import Callable

from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.outcome import (
    EXIT_CANNOT_START,
    EXIT_OK,
    EXIT_RANK_DIED,
    EXIT_TIMEOUT,
    Outcome,
    client_outcome,
    signal_name,
)
from kog_dist.launch.process import EngineProcess
from kog_dist.runtime.control import COORDINATOR, AbortCause


class Deaths:
    """Those of one engine; a loss aborts it. `was_ready`: whether it has been ready by now."""

    def __init__(self, engine: EngineProcesses, shutdown_timeout_s: float, was_ready: Callable[[], bool]) -> None:
        self._engine, self._shutdown_timeout_s, self._was_ready = engine, shutdown_timeout_s, was_ready

    def by_signal(self) -> Outcome | None:
        """A death by signal, which what the others say about the loss must not hide; a client is no cause of anything."""
        is_killed = any((child.exit_code or 0) < 0 and child.role != "client" for child in self._engine.children)
        return self.first() if is_killed else None

    def first(self) -> Outcome | None:
        """The death that the others followed from, None while all live."""
        dead = [child for child in self._engine.children if child.exit_code is not None]
        for child in dead:
            child.read_output()
        for child in sorted(dead, key=_blame):
            if child.role == "client":
                return client_outcome(child.pid, child.exit_code or 0)
            if child.role == "coordinator" and (outcome := self._drained(child)) is not None:
                if self._engine.request is not None:
                    continue  # somebody drained it; the client has its answer, or says what it was told
                return outcome
            return self.of(child)
        return None

    def _drained(self, coordinator: EngineProcess) -> Outcome | None:
        """How a drain ended, None if the coordinator ended for another reason."""
        if coordinator.exit_code == 0:
            return Outcome(EXIT_OK, "drained")
        return self.cut_off() if self._was_ready() and coordinator.exit_code == EXIT_TIMEOUT else None

    def cut_off(self) -> Outcome:
        """The end of a drain that took too long."""
        sentence = f"the running request did not finish within {self._shutdown_timeout_s:g} s and was ended"
        return Outcome(EXIT_TIMEOUT, "drain_timeout", sentence)

    def of(self, child: EngineProcess) -> Outcome:
        """The death of this process, whose exit code is known; all others are told."""
        code = child.exit_code
        assert code is not None
        rank = child.rank
        last = child.last_line().removeprefix(f"{child.role}: ")
        if not self._was_ready():
            return self._startup_death(child, code, last)
        cause = AbortCause.COORDINATOR_DIED if rank is None else AbortCause.RANK_DIED
        self._engine.abort(cause, COORDINATOR if rank is None else rank)
        why = f": {last}" if last and code >= 0 else ""
        sentence = f"{child.role} (pid {child.pid}) {child.how_it_ended()} while serving{why}; the engine was stopped"
        return Outcome(EXIT_RANK_DIED, cause.name.lower(), sentence, rank, child.pid, signal_name(code))

    def _startup_death(self, child: EngineProcess, code: int, last: str) -> Outcome:
        rank = child.rank
        self._engine.abort(AbortCause.STARTUP_FAILED, COORDINATOR if rank is None else rank)
        if code >= 0 and last:
            sentence = f"{child.role} could not start: {last}"
        else:
            sentence = f"{child.role} (pid {child.pid}) {child.how_it_ended()} during start-up"
        others = self._engine.world_size - (rank is not None)
        if others:
            sentence += f" ({others} rank{'s' if others > 1 else ''} stopped because of {child.role})"
        return Outcome(EXIT_CANNOT_START, "startup_failed", sentence, rank, child.pid, signal_name(code))


def _blame(child: EngineProcess) -> tuple[bool, bool]:
    """Sorts deaths seen together: what was killed before what stopped by itself (perhaps for missing a peer), the client last."""
    return child.role == "client", (child.exit_code or 0) >= 0
