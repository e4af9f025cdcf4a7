"""SIGINT and SIGTERM ask a run to save and stop instead of killing it in the middle of a step."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """While entered, the first SIGINT or SIGTERM is only noted; a second one acts as usual. Main thread only, else no effect."""

    def __init__(self) -> None:
        self._asked = False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def is_asked(self) -> bool:
        """Whether a signal has come."""
        return self._asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]
        self._before.clear()
