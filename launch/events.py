"""What the launcher tells its user, and the logs of a run: `launcher.log` and one file per process, appended to by every run."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from kog_dist.errors import LaunchError
from kog_dist.quoting import escaped_bytes, printable

EXIT_FILE = "exit.json"


def say(line: str, *, error: bool = False) -> None:
    """One line for the user, fit for a terminal; a reader that went away, or a full disk, does not stop the engine."""
    stream: Literal["stdout", "stderr"] = "stderr" if error else "stdout"
    try:
        print(printable(line), file=getattr(sys, stream), flush=True)
    except (OSError, ValueError):
        silence(stream)


def silence(stream: Literal["stdout", "stderr"]) -> None:
    """Send a stream that cannot be written to nowhere: what is still in its buffer would fail again at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, getattr(sys, stream).fileno())
        os.close(null)


@functools.cache
def _say_lost(folder: Path, reason: str) -> None:
    say(
        f"kog-launch: lines of the logs in {folder} are lost: {reason}; free space there, or choose another --log-dir", error=True
    )


def say_lost(folder: Path, error: OSError) -> None:
    """Tell the user that a log folder cannot be written, once: a full disk costs the logs, not the engine."""
    _say_lost(folder, error.strerror or str(error))


def make_log_folder(folder: Path) -> None:
    """Make it and what it is in, where they are missing, for this user alone: logs may hold prompts. Raises OSError."""
    for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # says what is wrong with one that is no folder


class LogFile:
    """The log of a process, appended to. Readable by this user alone, if it was not there before."""

    def __init__(self, folder: Path, role: str) -> None:
        """Open it and begin this run with a line. Raises LaunchError if it cannot be opened."""
        path = folder / f"{role.replace(' ', '-')}.log"
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab", buffering=0)
        except OSError as error:
            raise LaunchError(f"log file {path} cannot be opened: {error.strerror}; choose another --log-dir") from None
        self._folder = folder
        self.write(f"---- {role}, run of kog-launch {os.getpid()}, {_now()} ----\n".encode())

    def write(self, chunk: bytes) -> None:
        """Append to it, escaped, or say that this cannot be done."""
        chunk = escaped_bytes(chunk)
        try:
            if rest := chunk[self._file.write(chunk) or 0 :]:  # what no longer fits: the next attempt says why
                self._file.write(rest)
        except OSError as error:
            say_lost(self._folder, error)

    def close(self) -> None:
        """Write no more."""
        self._file.close()


class EventLog:
    """The launcher's own lines: to the user, and with the time to `launcher.log` in the log folder, if there is one."""

    def __init__(self, log_dir: str | None) -> None:
        """Make the log folder and forget how an earlier run ended. Raises LaunchError when that cannot be done."""
        self.log_dir: Path | None = None
        self._log: LogFile | None = None
        if log_dir is None:
            return
        self.log_dir = Path(log_dir)
        try:
            make_log_folder(self.log_dir)
            (self.log_dir / EXIT_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise LaunchError(
                f"log folder {log_dir} cannot be made or used: {error.strerror}; choose another --log-dir"
            ) from None
        self._log = LogFile(self.log_dir, "launcher")

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
            self._log.write(f"{_now()} {printable(text)}\n".encode(errors="replace"))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
