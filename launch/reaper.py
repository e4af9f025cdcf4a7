"""The process that cleans up after a launcher that was killed: a fork that waits for its end of a pipe to close.

Ranks and the coordinator are killed by the kernel when the launcher dies (PR_SET_PDEATHSIG). What remains is a client that is
still printing its error, and the instance folder with the socket file; the reaper ends the one and removes the other. It holds
the lease of the instance name until then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from kog_dist.runtime.instance import Instance
from kog_dist.runtime.socket_file import SocketFile
from kog_dist.system.parent_death import continue_without_parent

CLIENT_GRACE_S = 1.0


class Reaper:
    """The launcher's handle. `dismiss` after an orderly end; otherwise the reaper acts when the launcher is gone."""

    def __init__(self, pid: int, pipe_fd: int) -> None:
        self.pid = pid
        self._pipe_fd = pipe_fd

    @classmethod
    def start(cls, instance: Instance) -> Reaper:
        """Fork it; it holds the lease too, and removes the folder if the launcher dies. Call before any thread exists."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                continue_without_parent()
                _ignore_signals()
                os.setsid()
                _keep_only(read_fd, instance.lease_fd)
                _watch(read_fd, instance)
            finally:
                os._exit(0)
        os.close(read_fd)
        return cls(pid, write_fd)

    def watch(self, pid: int) -> None:
        """From now on `pid`, a child of the launcher, is killed if the launcher dies."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe_fd, b"%d\n" % pid)

    def has_ended(self) -> bool:
        """Whether somebody has killed it; it ends by itself only after the launcher. Reaps it."""
        if self._pipe_fd >= 0 and os.waitpid(self.pid, os.WNOHANG)[0]:
            os.close(self._pipe_fd)
            self._pipe_fd = -1
        return self._pipe_fd < 0

    def dismiss(self) -> None:
        """Everything is cleaned up; waits for the reaper's end. A second call does nothing."""
        if self.has_ended():
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe_fd, b"done\n")
        os.close(self._pipe_fd)
        self._pipe_fd = -1
        os.kill(self.pid, signal.SIGCONT)  # or one that was stopped would be waited for in vain
        os.waitpid(self.pid, 0)


def acquire_watched(name: str, socket_file: SocketFile | None = None) -> tuple[Instance, Reaper]:
    """Take an instance name, and start what gives it back, with the socket file, should this process be killed.

    Raises LaunchError, OSError; nothing is left then.
    """
    lease = Instance.acquire(name)
    lease.socket_file = socket_file
    try:
        return lease, Reaper.start(lease)
    except BaseException:
        lease.remove()
        raise


def _keep_only(*kept: int) -> None:
    """Close all descriptors but `kept`: somebody may wait for the end of the launcher's output."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in set(range(3)) - set(kept):
        os.dup2(null, fd)
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _ignore_signals() -> None:
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def _watch(read_fd: int, instance: Instance) -> None:
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
    instance.remove()


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
