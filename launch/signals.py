"""SIGINT, SIGTERM and SIGHUP as something the supervisor looks at when it is ready to, never as an exception in its middle."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> tuple[signal.Signals, ...]:
    """Those of STOPPING that stop this process: not SIGHUP where whoever started it ignores that, as nohup does.

    SIGINT in any case: a script's shell ignores it for all that runs in the background, which nobody means for an engine.
    """
    return tuple(s for s in STOPPING if s is not signal.SIGHUP or signal.getsignal(s) is not signal.SIG_IGN)


class StopSignals:
    """Counts stop signals while it is entered; `wakeup_fd` becomes readable with each, to end a select.

    `check(signum)` is called first, in the handler; it may end the process.
    """

    def __init__(self, check: Callable[[int], None] | None = None) -> None:
        self._check = check
        self.count = 0
        self.last: signal.Signals | None = None
        self.wakeup_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous: dict[signal.Signals, Any] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> StopSignals:
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for signum in heeded():
            self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.wakeup_fd)
        os.close(self._write_fd)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._check is not None:
            self._check(signum)
        self.count += 1
        self.last = signal.Signals(signum)

    def clear_wakeup(self) -> None:
        """Empty `wakeup_fd`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.wakeup_fd, 512):
                pass
