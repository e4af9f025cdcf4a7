"""Heartbeats of a rank while it works on a request."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from kog_dist.control import ControlPage

PERIOD_S = 0.1


class Heartbeat:
    """Beats in a thread while it is entered, as long as `progress` was called within `limit_s`.

    A step may last longer than the time after which a silent rank counts as hung (a large model on a CPU), so the main thread
    cannot beat by itself; but a step that never ends must not look alive. NumPy gives up the interpreter lock in its long
    operations, and a rank parses nothing that could hold it. A stopped process has no thread that beats.
    """

    def __init__(self, control: ControlPage, rank: int, limit_s: float) -> None:
        self._control, self._rank, self._limit_s = control, rank, limit_s
        self._last_progress_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.progress()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def progress(self) -> None:
        """Say that a step has begun."""
        self._last_progress_s = time.monotonic()

    def _beat(self) -> None:
        while not self._done.wait(PERIOD_S):
            if time.monotonic() - self._last_progress_s < self._limit_s:
                self._control.beat(self._rank)
