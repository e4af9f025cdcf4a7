"""What the launcher tells its user, and the logs of a run: `launcher.log` and one file per process, appended to by every run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal

from kog_dist.errors import LaunchError

EXIT_FILE = "exit.json"


def say(line: str, *, error: bool = False) -> None:
    """One line for the user; a reader that went away, or a full disk, does not stop the engine."""
    stream: Literal["stdout", "stderr"] = "stderr" if error else "stdout"
    try:
        print(line, file=getattr(sys, stream), flush=True)
    except (OSError, ValueError):
        silence(stream)


def silence(stream: Literal["stdout", "stderr"]) -> None:
    """Send a stream that cannot be written to nowhere: what is still in its buffer would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, getattr(sys, stream).fileno())
        os.close(null)


def open_log(folder: Path, role: str) -> FileIO:
    """The log of a process, open for appending after a line that begins this run. Raises LaunchError."""
    path = folder / f"{role.replace(' ', '-')}.log"
    try:
        log = path.open("ab", buffering=0)
    except OSError as error:
        raise LaunchError(f"log file {path} cannot be opened: {error.strerror}; choose another --log-dir") from None
    with contextlib.suppress(OSError):  # a full disk costs the log, not the engine
        log.write(f"---- {role}, run of kog-launch {os.getpid()}, {_now()} ----\n".encode())
    return log


class EventLog:
    """The launcher's own lines: to the user, and with the time to `launcher.log` in the log folder, if there is one."""

    def __init__(self, log_dir: str | None) -> None:
        """Make the log folder and forget how an earlier run ended. Raises LaunchError when that cannot be done."""
        self.log_dir: Path | None = None
        self._log: FileIO | None = None
        if log_dir is None:
            return
        self.log_dir = Path(log_dir)
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            (self.log_dir / EXIT_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise LaunchError(
                f"log folder {log_dir} cannot be made or used: {error.strerror}; choose another --log-dir"
            ) from None
        self._log = open_log(self.log_dir, "launcher")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def say(self, text: str, *, error: bool = False) -> None:
        """Tell the user and the log."""
        say(f"kog-launch: {text}", error=error)
        self.note(text)

    def note(self, text: str) -> None:
        """Tell only the log."""
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.write(f"{_now()} {text}\n".encode(errors="replace"))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
