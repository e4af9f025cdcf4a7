"""Two words that a launcher shares with a process that it has started: its heartbeat, and whether it was told to stop.

For gateway and router; coordinator and ranks have the control page. The words are in a memfd that both map; each has one writer.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from typing import Final

BEAT_S: Final = 0.1  # how often a loop that is idle beats
_BEAT, _STOP = 0, 16  # in words; on different cache lines, as they have different writers


class ProcessPage:
    """`create` in the launcher, `from_fd` in the process, which got `fd` through `pass_fds`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        self._words = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls) -> ProcessPage:
        """A new page, for one start of a process."""
        fd = os.memfd_create("kog-process", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    @classmethod
    def from_fd(cls, fd: int) -> ProcessPage | None:
        """The page behind an inherited descriptor, which it owns from now on; None for -1, a process that nobody watches."""
        if fd < 0:
            return None
        os.set_inheritable(fd, False)
        return cls(fd)

    def beat(self) -> None:
        """Say that the process's loop goes round. Writer: the process."""
        self._words[_BEAT] = time.monotonic_ns()

    def beat_age_s(self) -> float:
        """Seconds since the last heartbeat; 0 before the first one."""
        last_ns = self._words[_BEAT]
        return (time.monotonic_ns() - last_ns) / 1e9 if last_ns else 0.0

    def ask_to_stop(self) -> None:
        """Say that the SIGTERM which follows is meant. Writer: the launcher."""
        self._words[_STOP] = 1

    def obey(self, signum: int) -> None:
        """In the handler of a signal that stops the process: return if the launcher has sent it, else die of it.

        An end that nobody asked the launcher for is a loss, whoever sent the signal. The launcher sees it as any kill.
        """
        if not self._words[_STOP]:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def close(self) -> None:
        """Give the page up. A second call does nothing."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            os.close(self.fd)
            self.fd = -1
