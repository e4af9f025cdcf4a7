"""The process that cleans up after a launcher that was killed: a fork that waits for its end of a pipe to close.

Ranks and the coordinator are killed by the kernel when the launcher dies (PR_SET_PDEATHSIG). What remains is a client that is still
printing its error, and the instance folder with the socket file; the reaper ends the one and removes the other. It holds the lease
of the instance name until then.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from pathlib import Path

CLIENT_GRACE_S = 1.0


class Reaper:
    """The launcher's handle. `dismiss` after an orderly end; otherwise the reaper acts when the launcher is gone."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self.pid = pid
        self._pipe_fd = pipe_fd

    @classmethod
    def start(cls, folder: Path, lease_fd: int) -> Reaper:
        """Fork it. `folder` is removed when the launcher dies; `lease_fd` is kept open until then. Call before any thread exists."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                _keep_only(read_fd, lease_fd)
                _watch(read_fd, folder)
            finally:
                os._exit(0)
        os.close(read_fd)
        return cls(pid, write_fd)

    def watch(self, pid: int) -> None:
        """From now on `pid`, a child of the launcher, is killed if the launcher dies."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe_fd, b"%d\n" % pid)

    def dismiss(self) -> None:
        """Everything is cleaned up; waits for the reaper's end. A second call does nothing."""
        if self._pipe_fd < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe_fd, b"done\n")
        os.close(self._pipe_fd)
        self._pipe_fd = -1
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _keep_only(*kept: int) -> None:
    """Close all descriptors but `kept`: somebody may wait for the end of the launcher's output."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX") if low < 4096 else low)


def _watch(read_fd: int, folder: Path) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    pidfds: list[int] = []
    received = b""
    while chunk := os.read(read_fd, 4096):
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            if line == b"done":
                return
            with contextlib.suppress(ProcessLookupError):
                pidfds.append(os.pidfd_open(int(line)))
    _end(pidfds, time.monotonic() + CLIENT_GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


def _end(pidfds: list[int], deadline: float) -> None:
    """Let processes finish until the deadline, then kill them. The launcher's children are adopted by init, which reaps them."""
    poll = select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    running = set(pidfds)
    while running and (remaining_s := deadline - time.monotonic()) > 0:
        for pidfd, _ in poll.poll(remaining_s * 1000):
            poll.unregister(pidfd)
            running.discard(pidfd)
    for pidfd in running:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
