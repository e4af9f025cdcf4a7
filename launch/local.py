"""Child processes on this machine: started so that none can outlive the launcher, watched through pidfds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path

from kog_dist.errors import LaunchError
from kog_dist.launch.events import open_log

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_TAIL_LINES = 20
_LINE_BYTES = 2000


class Child:
    """One process of the engine in its own process group. `stderr_fd` is readable until it has closed its output."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], stderr_fd: int, log: FileIO | None) -> None:
        self.role = role  # "rank 3", "coordinator", "client"
        self.process = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.stderr_fd = stderr_fd
        self._log = log
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it. Reaps the process."""
        return self.process.poll()

    def read_output(self) -> bool:
        """Take what the child has printed; False when there will be no more."""
        if self.stderr_fd < 0:
            return False
        while True:
            try:
                chunk = os.read(self.stderr_fd, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                os.close(self.stderr_fd)
                self.stderr_fd = -1
                return False
            self._write_log(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[-_LINE_BYTES:]
            self._tail.extend(line[-_LINE_BYTES:].decode(errors="replace") for line in lines if line.strip())

    def _write_log(self, chunk: bytes) -> None:
        """Append to the process's log; a full disk costs the log, not the engine."""
        if self._log is not None:
            try:
                self._log.write(chunk)
            except OSError:
                self._log.close()
                self._log = None

    def last_line(self) -> str:
        """The last line of its output, where a process that stops by itself says why; empty if it said nothing."""
        return self._partial.decode(errors="replace").strip() or (self._tail[-1].strip() if self._tail else "")

    def send(self, signum: int) -> None:
        """Signal the process's whole group; nothing happens when it is gone already."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def close(self) -> None:
        """Release descriptors of a child that has been reaped."""
        if self.stderr_fd >= 0:
            os.close(self.stderr_fd)
            self.stderr_fd = -1
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._log is not None:
            self._log.close()
            self._log = None


def spawn(
    role: str,
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    log_dir: Path | None = None,
    on_terminal: bool = False,
) -> Child:
    """Start `python -m module arguments` in a process group of its own, so that Ctrl-C reaches only the launcher.

    Its output is collected, and the kernel kills it when the launcher dies. With `on_terminal` the output is the launcher's, the
    reaper looks after it, and it ignores SIGINT until it is ready to answer to one. Raises LaunchError if it, or its log, cannot
    be had.
    """
    log = None if log_dir is None or on_terminal else open_log(log_dir, role)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if on_terminal else write_fd,
            stderr=None if on_terminal else write_fd,
            env=dict(environment),
            pass_fds=tuple(pass_fds),
            process_group=0,
            preexec_fn=_prepare_for_terminal if on_terminal else _die_with(os.getpid()),
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(read_fd)
        if log is not None:
            log.close()
        raise LaunchError(f"cannot start {role}: {error}; free memory or raise the process limit") from error
    finally:
        os.close(write_fd)
    return Child(role, process, read_fd, log)


def _prepare_for_terminal() -> None:
    """For the child between fork and exec: its group is in the background, and `stty tostop` would stop it as it prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _die_with(parent_pid: int) -> Callable[[], None]:
    """For the child between fork and exec: be killed when the parent dies, also if that has happened already."""

    def arrange() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)

    return arrange
