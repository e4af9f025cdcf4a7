"""One process of the engine as the launcher sees it, whoever started it: what it prints, when and how it ended, how to end it."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from kog_dist.launch.events import LogFile
from kog_dist.launch.oom import KILLED, OomKills
from kog_dist.launch.outcome import how_it_ended
from kog_dist.records import dataclass
from kog_dist.runtime.notes import NOTE

_TAIL_LINES = 20
_LINE_BYTES = 2000
_STATE_FIELD, _FLAGS_FIELD, _USER_FIELD, _SYSTEM_FIELD = 0, 6, 11, 12  # of /proc/PID/stat behind the name
_PF_EXITING = 0x4  # of the kernel's flags of a thread
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CoreUse:
    """Whether a process's main thread has a core or waits for one, and the seconds of cores that all its threads have had."""

    wants: bool
    had_s: float


class EngineProcess(ABC):
    """`ended_fd` becomes readable when it may have ended, `stderr_fd` when it has printed; both are -1 once they are closed."""

    def __init__(self, role: str, pid: int, *, ended_fd: int, stderr_fd: int, log: LogFile | None) -> None:
        self.role = role  # "rank 3", "coordinator", "client"
        self.pid = pid
        self.ended_fd = ended_fd
        self.stderr_fd = stderr_fd
        self._stat_fd = -1  # what the system tells of it
        self._log = log
        self.oom_kills = OomKills(pid)
        self._partial = b""
        self.notes: list[str] = []  # that it has made for the log
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""

    @property
    @abstractmethod
    def pidfd(self) -> int:
        """Refers to it until it is closed; -1 afterwards."""

    def is_exiting(self) -> bool:
        """Whether it is ending: its main thread has left for good. The system says how it ended once its memory is given back,
        which takes a rank with much of it on a GPU 0.2 s. False when it has been reaped.
        """
        try:
            return bool(int(self._stat()[_FLAGS_FIELD]) & _PF_EXITING)
        except (ValueError, IndexError):  # a system that does not tell
            return False

    def is_stopped(self) -> bool:
        """Whether the system lets it do nothing until somebody continues it: SIGSTOP, or a debugger. False when it has ended."""
        return self._stat()[_STATE_FIELD : _STATE_FIELD + 1] in ([b"T"], [b"t"])

    def core_use(self) -> CoreUse:
        """What it has of the machine's cores at this moment. As one that sleeps when it has ended."""
        try:
            fields = self._stat()
            ticks = int(fields[_USER_FIELD]) + int(fields[_SYSTEM_FIELD])
            return CoreUse(fields[_STATE_FIELD] == b"R", ticks / _TICKS_PER_S)
        except (ValueError, IndexError):  # it was reaped, or the system does not tell
            return CoreUse(wants=False, had_s=0.0)

    def _stat(self) -> list[bytes]:
        """What /proc/PID/stat says behind the name; nothing once the process was reaped, or where the system does not tell."""
        try:
            if self._stat_fd < 0:
                info = Path(f"/proc/self/fdinfo/{self.pidfd}").read_text(encoding="ascii")
                pid = next(line for line in info.splitlines() if line.startswith("Pid:")).split()[1]
                self._stat_fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # of this process, whoever has its number later
            return os.pread(self._stat_fd, _LINE_BYTES, 0).rpartition(b")")[2].split()
        except (OSError, StopIteration, IndexError):
            return []

    @abstractmethod
    def send(self, signum: int) -> None:
        """Signal the process's whole group; nothing happens when it is gone already."""

    @property
    def rank(self) -> int | None:
        """The rank that it is, None for the others."""
        return int(self.role.split()[1]) if self.role.startswith("rank ") else None

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL` or `stopped with exit code 70`; it must have ended."""
        code = self.exit_code
        assert code is not None
        if code == -signal.SIGKILL and self.oom_kills.has_risen():
            return KILLED
        return how_it_ended(code)

    def read_output(self) -> bool:
        """Take what it has printed; False when there will be no more."""
        self.oom_kills.look()
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
            if self._log is not None:
                self._log.write(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[-_LINE_BYTES:]
            self._take_lines(line[-_LINE_BYTES:].decode(errors="replace") for line in lines if line.strip())

    def _take_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            if line.startswith(NOTE):
                self.notes = [*self.notes, line.removeprefix(NOTE)][-_TAIL_LINES:]
            else:
                self._tail.append(line)

    def last_line(self) -> str:
        """The last line of its output, where a process that stops by itself says why; empty if it said nothing."""
        return self._partial.decode(errors="replace").strip() or (self._tail[-1].strip() if self._tail else "")

    def close(self) -> None:
        """Release the descriptors of a process that has ended."""
        for name in ("stderr_fd", "ended_fd", "_stat_fd"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
        if self._log is not None:
            self._log.close()
            self._log = None
