"""A bound for MPI_Init and MPI_Finalize, which block in C while Python stands still: a fork that kills this process in time."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

_PATIENCE_S = 2.0  # then the user hears what is waited for


class Watchdog:
    """Runs until `dismiss`. Start it before any thread exists."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self._pid = pid
        self._pipe_fd = pipe_fd

    @classmethod
    def start(cls, limit_s: float, *, speaks: bool) -> Watchdog:
        """Kill this process after `limit_s`; the one that `speaks` says what happens."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_fd)
                for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(signum, signal.SIG_IGN)
                _watch(read_fd, parent_pid, limit_s, speaks)
            finally:
                os._exit(0)
        os.close(read_fd)
        return cls(pid, write_fd)

    def dismiss(self) -> None:
        """All is well."""
        os.close(self._pipe_fd)
        os.waitpid(self._pid, 0)


def _watch(read_fd: int, parent_pid: int, limit_s: float, speaks: bool) -> None:
    def is_over(seconds: float) -> bool:
        return bool(select.select([read_fd], [], [], max(seconds, 0.0))[0])

    if is_over(min(_PATIENCE_S, limit_s)):
        return
    if speaks:
        _say("waiting for the other MPI processes to start")
    if is_over(limit_s - _PATIENCE_S):
        return
    if speaks:
        _say("the MPI processes did not meet in time: one of them hangs or has not come; see --startup-timeout")
    remove_shared_memory(parent_pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(parent_pid, signal.SIGKILL)


def remove_shared_memory(pid: int) -> None:
    """Unlink MPICH's file in /dev/shm, which nobody does where a process ends before MPI_Finalize."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        for path in {line.split()[-1] for line in maps.splitlines()}:
            if path.startswith("/dev/shm/mpich_shm_"):
                os.unlink(path)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"kog-launch: {text}\n".encode())
