"""What the launcher tells its user, and the logs of a run: `launcher.log` and one file per process, appended to by every run."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Literal

from kog_dist.config import LaunchConfig
from kog_dist.errors import LaunchError
from kog_dist.foreign_file import append_fd
from kog_dist.quoting import escaped_bytes, printable
from kog_dist.system.files import EXIT_FILE, log_folder

MOST_BYTES: Final = 16 << 20  # of a log file: some 40,000 lines of requests
NUM_OLDER: Final = 3


def say(line: str, *, error: bool = False) -> None:
    """One line for the user, fit for a terminal; a reader that went away, or a full disk, does not stop the engine."""
    stream: Literal["stdout", "stderr"] = "stderr" if error else "stdout"
    try:
        print(printable(line), file=getattr(sys, stream), flush=True)
    except (OSError, ValueError):
        silence(stream)


def is_terminal(stream: Literal["stdout", "stderr"]) -> bool:
    """Whether somebody may be reading it."""
    with contextlib.suppress(ValueError, AttributeError):  # it may be closed
        return bool(getattr(sys, stream).isatty())
    return False


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


def check_log_folder(log_dir: str) -> None:
    """Raise the LaunchError with which a run that keeps its logs there would end. Leaves nothing behind."""
    folder = Path(log_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_log_folder(folder)
        if (folder / EXIT_FILE).is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        for path in folder.glob("*.log"):
            _check_log(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unusable(log_dir, error) from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _check_log(path: Path) -> None:
    try:
        os.close(append_fd(path))
    except OSError as error:
        raise _not_opened(path, error) from None


def _unusable(log_dir: str, error: OSError) -> LaunchError:
    return LaunchError(f"log folder {log_dir} cannot be made or used: {error.strerror}; choose another --log-dir")


def _not_opened(path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"log file {path} cannot be opened: {error.strerror}; choose another --log-dir")


class LogFile:
    """The log of a process, appended to. Readable by this user alone, if it was not there before.

    One that grows beyond MOST_BYTES goes on as a new file; NUM_OLDER earlier ones are kept, as `NAME.log.1` and so on.
    """

    def __init__(self, folder: Path, role: str) -> None:
        """Open it and begin this run with a line. Raises LaunchError if it cannot be opened."""
        self._folder, self._path = folder, folder / f"{role.replace(' ', '-')}.log"
        try:
            self._open()
        except OSError as error:
            raise _not_opened(self._path, error) from None
        self.write(f"---- {role}, run of kog-launch {os.getpid()}, {_now()} ----\n".encode())

    def _open(self) -> None:
        self._file = os.fdopen(append_fd(self._path), "ab", buffering=0)
        self._num_bytes = os.fstat(self._file.fileno()).st_size

    def write(self, chunk: bytes) -> None:
        """Append to it, escaped, or say that this cannot be done."""
        chunk = escaped_bytes(chunk)
        try:
            if self._num_bytes and self._num_bytes + len(chunk) > MOST_BYTES:
                self._begin_anew()
            self._num_bytes += len(chunk)
            if rest := chunk[self._file.write(chunk) or 0 :]:  # what no longer fits: the next attempt says why
                self._file.write(rest)
        except OSError as error:
            say_lost(self._folder, error)

    def _begin_anew(self) -> None:
        """The file becomes the newest of the older ones. Where that cannot be done it is appended to for as long again."""
        self._num_bytes = 0
        older = [self._path, *(Path(f"{self._path}.{age}") for age in range(1, NUM_OLDER + 1))]
        for later, earlier in reversed(list(itertools.pairwise(older))):
            with contextlib.suppress(FileNotFoundError):
                later.replace(earlier)
        before = self._file
        self._open()
        before.close()

    def close(self) -> None:
        """Write no more."""
        self._file.close()


class EventLog:
    """The launcher's own lines: to the user, and with the time to `launcher.log` in the log folder, if there is one."""

    def __init__(self, log_dir: str | None, unless_given: Path | None = None) -> None:
        """Make the log folder and forget how an earlier run ended. Raises LaunchError when that cannot be done.

        Without a `log_dir` logs go to the folder `unless_given`. A run that cannot have that one for itself has none.
        """
        self.log_dir: Path | None = None
        self.without = "none; --log-dir FOLDER keeps them"  # for people: why there are no logs
        self._log: LogFile | None = None
        self._lock_fd = -1
        folder = Path(log_dir) if log_dir is not None else unless_given
        if folder is None:
            return
        try:
            make_log_folder(folder)
            if log_dir is None:
                self._lock_fd = _locked(folder)
            (folder / EXIT_FILE).unlink(missing_ok=True)
            self._log = LogFile(folder, "launcher")
        except (OSError, LaunchError) as error:
            if log_dir is None:
                self._give_up(folder, error)
                return
            if isinstance(error, LaunchError):
                raise
            raise _unusable(log_dir, error) from None
        self.log_dir = folder

    @classmethod
    def of_run(cls, settings: LaunchConfig, *, serves: bool) -> EventLog:
        """Of an engine, or of a fleet. One that `serves` has logs unless it is told otherwise, so that they are there at night.

        Raises LaunchError.
        """
        folder = None
        if serves:
            with contextlib.suppress(OSError):
                folder = log_folder(settings.instance or "default")
        return cls(settings.log_dir, folder)

    def _give_up(self, folder: Path, error: OSError | LaunchError) -> None:
        why = f"{folder} cannot be written: {error.strerror}" if isinstance(error, OSError) else str(error)
        self.without = f"none: {why}; --log-dir FOLDER keeps them elsewhere"
        self.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Write no more; somebody else may have the folder."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def say(self, text: str, *, error: bool = False) -> None:
        """Tell the user and the log."""
        say(f"kog-launch: {text}", error=error)
        self.note(text)

    def say_end(self, sentence: str) -> None:
        """Tell why the run has failed; who sits at a terminal also wants to know where more is said."""
        self.say(sentence, error=True)
        if self.log_dir is not None and is_terminal("stderr"):
            say(f"kog-launch: the logs are in {self.log_dir}", error=True)

    def note(self, text: str) -> None:
        """Tell only the log."""
        if self._log is not None:
            self._log.write(f"{_now()} {printable(text)}\n".encode(errors="replace"))


def _locked(folder: Path) -> int:
    """A descriptor that keeps the folder for this launcher. Raises LaunchError if another one has it, OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise LaunchError(f"another engine writes into {folder}") from None
    except OSError:  # a network's file system without locks
        pass
    return fd


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
