"""Heartbeats of a rank while it works on a request."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from kog_dist.runtime.control import ControlPage

PERIOD_S = 0.1


class Heartbeat:
    """Beats in a thread while it is entered, as long as `progress` was called within `limit_s`. Entered again and again.

    A step may last longer than the time after which a silent rank counts as hung (a large model on a CPU), so the main thread
    cannot beat by itself; but a step that never ends must not look alive. NumPy gives up the interpreter lock in its long
    operations, and a rank parses nothing that could hold it. A stopped process has no thread that beats.

    The thread starts with the first request and stays, since to start one takes 0.1 ms of the time to the first token. Between
    requests it wakes ten times a second and leaves the control page alone.
    """

    def __init__(self, control: ControlPage, rank: int, limit_s: float) -> None:
        self._control, self._rank, self._limit_s = control, rank, limit_s
        self._last_progress_s = time.monotonic()
        self._lock = threading.Lock()  # held to beat, and to change whether it is entered
        self._is_entered = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Heartbeat:
        self.progress()
        self._control.beat(self._rank)
        with self._lock:
            self._is_entered = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._is_entered = False

    def progress(self) -> None:
        """Say that a step has begun."""
        self._last_progress_s = time.monotonic()

    def _beat(self) -> None:
        while not self._closed.wait(PERIOD_S):
            with self._lock:
                if self._is_entered and time.monotonic() - self._last_progress_s < self._limit_s:
                    self._control.beat(self._rank)

    def close(self) -> None:
        """End the thread; it may not be entered any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
