"""Ctrl-C of `kog-chat`: an exception where it ends something, and only there.

Elsewhere the terminal is put in order and what was said is remembered, which an exception would leave half done. A Ctrl-C that
comes then is kept, and ends what comes next.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Final

LOOK_S: Final = 0.1


class Interrupts:
    """Answers SIGINT while it is entered: `with interrupts.may_end():` is around what it ends, by a KeyboardInterrupt.

    Python acts on a signal between two of its own steps. One that comes after the last step before a wait in C (`input`, with
    readline) would be seen when that wait ends. So a timer interrupts each wait again and again. Main thread only.
    """

    def __init__(self) -> None:
        self._raises = self._has_come = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {signal.SIGALRM: signal.signal(signal.SIGALRM, _look)}
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        self._has_come = False

    def may_end(self) -> _Endable:
        """What is inside is ended by the first Ctrl-C, also by one that came before it."""
        return _Endable(self)

    def begin(self) -> None:
        """Raise KeyboardInterrupt at the first SIGINT from now on, at once if there was one."""
        assert self._before, "a timer's signal would end the process"
        self._raises = True
        signal.setitimer(signal.ITIMER_REAL, LOOK_S, LOOK_S)
        if self._has_come:
            self._note(signal.SIGINT, None)

    def end(self) -> None:
        """Keep what comes from now on."""
        self._raises = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self._has_come = not self._raises
        if self._raises:
            self._raises = False  # once: what cleans up after the exception is not to be ended by another one
            raise KeyboardInterrupt


class _Endable:
    """No generator: it would be closed whenever it is freed, perhaps while the next one is entered."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __enter__(self) -> None:
        self._interrupts.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._interrupts.end()


def _look(_signum: int, _frame: FrameType | None) -> None:
    """That the wait was interrupted is all."""
