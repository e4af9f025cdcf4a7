"""What a process of the engine tells its log beside the reason for its end."""

from __future__ import annotations

import sys
import time

NOTE = "note: "  # how such a line begins; the launcher takes the last other one for the reason


def note(text: str) -> None:
    """One line."""
    print(f"{NOTE}{' '.join(text.split())}", file=sys.stderr, flush=True)


class Watch:
    """What the steps of something took, one after the other."""

    def __init__(self) -> None:
        self._steps: list[str] = []
        self._begin_s = self._last_s = time.monotonic()

    def ended(self, step: str) -> None:
        """The step began when the one before it ended."""
        now_s = time.monotonic()
        self._steps.append(f"{step} {now_s - self._last_s:.1f}")
        self._last_s = now_s

    def __str__(self) -> str:
        return f"{self._last_s - self._begin_s:.1f} s ({', '.join(self._steps)})"
