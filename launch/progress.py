"""What start-up waits for, shown while it lasts: one line that is rewritten on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from kog_dist.launch.events import say
from kog_dist.runtime.control import RankState

DOING: Final = {
    RankState.STARTING: "starting its interpreter",
    RankState.LOADING: "loading weights",
    RankState.LINKING: "waiting for the other ranks",
    RankState.READY: "ready",
    RankState.RUNNING: "running",
    RankState.STOPPED: "stopped",
    RankState.FAILED: "failed",
}
_ON_TERMINAL_AFTER_S = 0.3  # shorter start-ups show nothing
_LINES_AFTER_S = 10.0  # a log wants no line for an ordinary start-up
_LINES_UNDER_STARTER_AFTER_S = 1.0  # mpirun and Ray hide the terminal at which somebody waits
_LINES_EVERY_S = 2.0
_ERASE = "\r\x1b[2K"


def waiting_for(states: Sequence[RankState]) -> str:
    """`waiting for rank 3: loading weights`: the ranks that are furthest behind, on which the others wait."""
    behind = min((state for state in states if state < RankState.READY), default=None)
    if behind is None:
        return "waiting for the coordinator: opening its socket"
    ranks = [rank for rank, state in enumerate(states) if state is behind]
    if len(ranks) == 1:
        names = f"rank {ranks[0]}"
    elif ranks == list(range(ranks[0], ranks[-1] + 1)):
        names = f"ranks {ranks[0]} to {ranks[-1]}"
    else:
        names = f"ranks {', '.join(map(str, ranks))}"
    return f"waiting for {names}: {DOING[behind]}"


class StartupProgress:
    """Say as often as you like what is waited for, then `clear`."""

    def __init__(self, *, under_starter: bool) -> None:
        """`under_starter`: a program such as mpirun stands between this process and the user's terminal."""
        self._is_live = _is_terminal()
        self._next_s = time.monotonic() + (
            _ON_TERMINAL_AFTER_S if self._is_live else _LINES_UNDER_STARTER_AFTER_S if under_starter else _LINES_AFTER_S
        )
        self._shown = ""

    def show(self, text: str) -> None:
        """Show it if it is new and it is time to."""
        now_s = time.monotonic()
        if text == self._shown or now_s < self._next_s:
            return
        self._shown = text
        if self._is_live:
            self._write(f"{_ERASE}kog-launch: {text}")
        else:
            self._next_s = now_s + _LINES_EVERY_S
            say(f"kog-launch: {text}", error=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_live and self._shown:
            self._write(_ERASE)
            self._shown = ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _is_terminal() -> bool:
    with contextlib.suppress(ValueError):
        return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return False
