"""How often an engine that is lost is started again before somebody must look: 3 times in 10 minutes, then it stays down."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

MAX_RESTARTS: Final = 3
WINDOW_S: Final = 600.0


class RestartBudget:
    """Restarts of the last 10 minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._taken: deque[float] = deque()

    def take(self) -> bool:
        """Take one restart, or False when there is none left."""
        now_s = self._clock()
        while self._taken and now_s - self._taken[0] > WINDOW_S:
            self._taken.popleft()
        if len(self._taken) == MAX_RESTARTS:
            return False
        self._taken.append(now_s)
        return True

    def __str__(self) -> str:
        return f"{MAX_RESTARTS} restarts in {WINDOW_S / 60:g} min"
