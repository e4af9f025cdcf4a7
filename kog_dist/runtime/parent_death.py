"""What the kernel sends to a process when its parent dies (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def continue_without_parent() -> None:
    """For a process that has work to do once its parent is dead: one that is stopped then goes on (SIGCONT) and does it.

    It learns of the death by other means: a pidfd, a pipe that closes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
