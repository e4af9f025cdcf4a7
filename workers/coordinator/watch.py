"""What the coordinator sees of the ranks by itself. To act on it is the launcher's; this is for a launcher that does not."""

from __future__ import annotations

import time
from pathlib import Path

from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.wait import Deadline

SILENT_S = 1.0  # without a heartbeat, while the launcher is stopped and cannot judge it by the limit it was given
LAUNCHER_GRACE_S = 5.0  # for the launcher to act: a rank that failed may take seconds to give its memory back and exit
_LOOK_EVERY_S = 0.05


class RankWatch:
    """Looks for ranks that will not answer any more."""

    def __init__(self, control: ControlPage, supervisor_pid: int) -> None:
        self._control = control
        self._supervisor_pid = supervisor_pid
        self._next_look_s = 0.0
        self._grace: Deadline | None = None
        self._fault: str | None = None

    def has_failed_rank(self) -> bool:
        """Whether a rank says of itself that it failed."""
        return any(self._control.state(rank) is RankState.FAILED for rank in range(self._control.world_size))

    def look(self) -> str | None:
        """A sentence once a rank is lost and the launcher has had its time to act, else None. Cheap enough for every turn."""
        if time.monotonic() < self._next_look_s:
            return self._fault
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S
        lost = self._lost_rank()
        if lost is None:
            self._grace = self._fault = None
        elif self._grace is None:
            self._grace = Deadline.after(LAUNCHER_GRACE_S)
        elif self._grace.expired():
            self._fault = lost
        return self._fault

    def _lost_rank(self) -> str | None:
        for rank in range(self._control.world_size):
            state, age_s = self._control.state(rank), self._control.beat_age_s(rank)
            if state is RankState.FAILED:
                return f"rank {rank} failed and the launcher did not act on it; stop the engine and start it again"
            if state in (RankState.READY, RankState.RUNNING) and age_s > SILENT_S and self._launcher_is_stopped():
                return (
                    f"rank {rank} has given no sign of life for {age_s:.1f} s and the launcher (pid {self._supervisor_pid}) is "
                    f"itself stopped; continue the launcher with SIGCONT, or kill it and start the engine again"
                )
        return None

    def _launcher_is_stopped(self) -> bool:
        try:
            stat = Path(f"/proc/{self._supervisor_pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False  # it is dead, which the coordinator sees from its pidfd
        return stat.rpartition(")")[2].split()[0] in ("T", "t")
