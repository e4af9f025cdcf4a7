"""What the kernel sends to a process when its parent dies (PR_SET_PDEATHSIG)."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)  # found once: between fork and exec nothing is looked up


def die_with_parent(parent_pid: int) -> bool:
    """Be killed as soon as the parent dies. False if it is not the parent any more: it died before this was arranged."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent_pid


def stop_with_parent(parent_pid: int) -> bool:
    """Be told to stop (SIGTERM) as soon as the parent dies. False if it has died before."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent_pid


def outlive_parent() -> None:
    """Be told nothing when the parent dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def continue_without_parent() -> None:
    """For a process that has work to do once its parent is dead: one that is stopped then goes on (SIGCONT) and does it.

    It learns of the death by other means: a pidfd, a pipe that closes.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
