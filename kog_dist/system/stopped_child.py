"""Whether a child of this process is stopped (SIGSTOP, a debugger), so that whoever waits for it waits in vain.

One rule for all processes that work for their parent alone; launch/liveness.py has it for those that a launcher starts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

STOPPED_S: Final = 1.0  # after which it is given up, and another one started
LOOK_EVERY_S: Final = 0.1


def is_stopped(pid: int) -> bool:
    """Whether somebody has stopped this child, and nobody has continued it. False once it has ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


class StopWatch:
    """Looks at one child, every LOOK_EVERY_S or more seldom."""

    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock = pid, clock
        self._since_s: float | None = None  # it is seen stopped

    @property
    def is_stopped(self) -> bool:
        """Whether it was stopped at the last look."""
        return self._since_s is not None

    def is_lost(self) -> bool:
        """Whether it has been stopped for STOPPED_S, as far as was looked."""
        if not is_stopped(self._pid):
            self._since_s = None
            return False
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s >= STOPPED_S
