"""What a `kog-launch` leaves in its instance folder for commands of the same user: who it is, and where it writes its logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kog_dist.config import MAX_TIMEOUT_S
from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.folder_file import check_path, check_process, read_record
from kog_dist.runtime.instance import process_start_time
from kog_dist.system.files import write_at_once

LAUNCHER_FILE: Final = "launcher.json"


@dataclass(frozen=True, slots=True)
class LauncherFile:
    """A launcher on this machine. `start_time` is its start in clock ticks since boot: pids are used again."""

    pid: int
    start_time: int
    shutdown_timeout_s: float  # most that a stop waits for the running request
    log_dir: str | None
    instance: str  # name of its engine; that of the folder, but for a launcher whose engine Ray has placed

    def __post_init__(self) -> None:
        check_process(self.pid, self.start_time)
        if not 0 <= self.shutdown_timeout_s <= MAX_TIMEOUT_S:  # true for NaN
            raise ValueError(f"no run has {self.shutdown_timeout_s} s to end")
        if self.log_dir is not None:
            check_path(self.log_dir)

    @classmethod
    def of_this_process(cls, instance: str, shutdown_timeout_s: float, log_dir: Path | None) -> LauncherFile:
        """To be written by the launcher itself."""
        pid, logs = os.getpid(), None if log_dir is None else str(log_dir.absolute())
        return cls(pid, process_start_time(pid) or 0, shutdown_timeout_s, logs, instance)

    def write(self, folder: Path) -> None:
        """Into the instance folder. Raises LaunchError."""
        try:
            write_at_once(folder / LAUNCHER_FILE, json.dumps(asdict(self)).encode(), is_private=True)
        except OSError as error:
            raise LaunchError(f"the engine's folder {folder} cannot be written: {error.strerror}; free space there") from error

    @classmethod
    def read(cls, folder: Path) -> LauncherFile | None:
        """That of an instance folder; None where there is none, or none that can be read."""
        return read_record(cls, folder / LAUNCHER_FILE)

    def open(self) -> int | None:
        """A pidfd of that very process, None if it has ended. The caller closes it."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            return None
        if process_start_time(self.pid) == self.start_time:
            return pidfd
        os.close(pidfd)
        return None


def ask_to_stop(pidfd: int, *, at_once: bool) -> None:
    """Have a launcher drain and stop; `at_once`: without draining. Nothing happens to one that has ended."""
    for signum in (signal.SIGTERM, signal.SIGINT) if at_once else (signal.SIGTERM,):  # two of one kind may become one
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signum)
