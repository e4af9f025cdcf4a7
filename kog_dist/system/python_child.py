"""The one command line of all Python processes that this project starts, and what a serving process may not do."""

from __future__ import annotations

import ctypes
import functools
import resource
import shutil
import signal
import site
import sys
from pathlib import Path
from typing import Final

from kog_dist.system.parent_death import die_with_parent

_PR_SET_NO_NEW_PRIVS: Final = 38
_UNIFIED_MEMORY: Final = Path("/dev/nvidia-uvm")  # made by nvidia-modprobe, for the first program that uses CUDA


def command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS`; see `interpreter`."""
    return interpreter("-m", module, *arguments)


def interpreter(*arguments: str) -> list[str]:
    """This Python with these arguments, importing nothing from where it happens to be started: a module in the working
    directory (a model folder, /tmp) must never run. Nor from the user's own packages, unless this process has some of them.
    """
    return [sys.executable, "-P", *(() if _has_user_packages() else ("-s",)), *arguments]


def harden() -> None:
    """Take from this process, and from all that it starts from now on, what only harms: core dumps, which hold prompts and keys,
    and programs that give more rights than it has. The second holds for this thread and what it starts: call it from the first.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if _UNIFIED_MEMORY.exists() or shutil.which("nvidia-modprobe") is None:  # a setuid program, without which CUDA cannot begin
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def begin_helper(parent_pid: int, memory_bytes: int) -> bool:
    """For a process that works for its parent alone: it dies with it, leaves Ctrl-C to the launcher, and may use so much memory.

    False: the parent is gone already, and so should this process be.
    """
    if not die_with_parent(parent_pid):
        return False
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    return True


@functools.cache
def _has_user_packages() -> bool:
    """Whether the project, or something that it needs, was installed with `pip install --user`."""
    folder = site.getusersitepackages() if site.ENABLE_USER_SITE else None
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return folder is not None and any(file is not None and Path(file).is_relative_to(folder) for file in files)
