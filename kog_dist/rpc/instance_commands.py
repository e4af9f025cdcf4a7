"""`kog-client stop` and `kog-client logs`: an engine of this user on this machine, by its name. They need no answer of it."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.rpc.output import OutputError, check_stdout, progress_line, write_error, write_out
from kog_dist.runtime.files import EXIT_FILE, log_folder
from kog_dist.runtime.instance import instances_root, is_stale
from kog_dist.runtime.launcher_file import LauncherFile, ask_to_stop

STOP_MARGIN_S: Final = 20.0  # beside the time for the running request: that in which a launcher gives a process up, and more
_FOLLOW_S: Final = 0.2
_DEFAULT_LOG: Final = "launcher"


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """An engine of this user; `launcher` is None where no kog-launch of this machine runs it."""

    name: str
    folder: Path
    launcher: LauncherFile | None

    @classmethod
    def find(cls, instance: str | None) -> NamedEngine:
        """That of a name, whether it runs or not. Raises ConfigError for what is no name, LaunchError."""
        name = "default" if instance is None else instance
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"instance name {name!r} must be a name, not a path")
        folder = instances_root() / name
        return cls(name, folder, LauncherFile.read(folder))

    def open_launcher(self) -> int | None:
        """A pidfd of its launcher, None if none runs here."""
        return None if self.launcher is None else self.launcher.open()


def stop(instance: str | None, *, at_once: bool) -> int:
    """Have an engine end, and wait until it has. Returns the exit code. Raises LaunchError if there is none, or it does not."""
    check_stdout()
    engine = NamedEngine.find(instance)
    pidfd = engine.open_launcher()
    if pidfd is None or engine.launcher is None:
        raise LaunchError(_why_not(engine))
    launcher, begin_s = engine.launcher, time.monotonic()
    limit_s = STOP_MARGIN_S + (0.0 if at_once else launcher.shutdown_timeout_s)
    try:
        ask_to_stop(pidfd, at_once=at_once)
        with progress_line(enabled=True) as progress:
            if not at_once:
                progress(f"the running request has {launcher.shutdown_timeout_s:g} s to end; --now does not wait for it")
            has_ended = bool(select.select([pidfd], [], [], limit_s)[0])
    finally:
        os.close(pidfd)
    if not has_ended:
        remedy = f"kill -KILL {launcher.pid}" if at_once else "kog-client stop --now"
        raise LaunchError(f"engine {engine.name} (pid {launcher.pid}) has not ended after {limit_s:g} s; end it with {remedy}")
    write_out(f"engine {engine.name} has stopped after {time.monotonic() - begin_s:.1f} s\n")
    if launcher.log_dir is not None and (sentence := _last_sentence(Path(launcher.log_dir))) is not None:
        write_error(f"kog-client: its last words: {sentence}")
    return 0


def _why_not(engine: NamedEngine) -> str:
    if engine.folder.is_dir() and not is_stale(engine.folder):
        return f"engine {engine.name} was not started by a kog-launch of this machine; kog-client drain asks the engine itself"
    return f"no engine of the name {engine.name!r} runs here; kog-doctor lists those that do"


def _last_sentence(folder: Path) -> str | None:
    """What the run says of its end, if that was a failure."""
    try:
        sentence = json.loads((folder / EXIT_FILE).read_text(encoding="utf-8"))["sentence"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sentence if isinstance(sentence, str) else None


def logs(instance: str | None, process: str | None, *, num_lines: int, follow: bool) -> int:
    """Print the last lines of a log, and with `follow` what comes, until the engine has ended. Returns the exit code.

    Raises LaunchError where there are no logs, ConfigError for a process that has none.
    """
    check_stdout()
    engine = NamedEngine.find(instance)
    pidfd = engine.open_launcher()
    try:
        path = _log_file(_folder_of(engine, is_running=pidfd is not None), process or _DEFAULT_LOG)
        with closing(_Tail(path)) as tail:
            _show(tail.last_lines(num_lines))
            for _ in _looks(pidfd) if follow else ():
                _show(tail.news())
    except BrokenPipeError:  # whoever reads them has enough
        return 0
    except OSError as error:
        raise OutputError(f"the log cannot be read: {error}") from None
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return 0


def _folder_of(engine: NamedEngine, *, is_running: bool) -> Path:
    if is_running and engine.launcher is not None:
        if engine.launcher.log_dir is None:
            raise LaunchError(f"engine {engine.name} keeps no logs; start it with --log-dir FOLDER")
        return Path(engine.launcher.log_dir)
    folder = log_folder(engine.name)
    if not folder.is_dir():
        raise LaunchError(f"there are no logs of an engine {engine.name!r} in {folder}; those of --log-dir are where it said")
    return folder


def _log_file(folder: Path, process: str) -> Path:
    names = sorted(str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.log"))
    if process not in names:
        raise ConfigError(f"there is no log of {process!r} in {folder}; there are {', '.join(names) or 'none'}")
    return folder / f"{process}.log"


class _Tail:
    """The end of a log that grows, and goes on as a new file when it has grown enough."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb")

    def last_lines(self, num_lines: int) -> bytes:
        """Of all that is there now, also in the file before it if this one has not so many."""
        text = self._file.read()
        older = Path(f"{self._path}.1")
        if text.count(b"\n") < num_lines and older.exists():
            text = older.read_bytes() + text
        return b"".join(text.splitlines(keepends=True)[-num_lines:]) if num_lines else b""

    def news(self) -> bytes:
        """What was written since."""
        if self._file.tell() > os.fstat(self._file.fileno()).st_size:  # logrotate has emptied it
            self._file.seek(0)
        text = self._file.read()
        with suppress(FileNotFoundError):  # it is being renamed in this moment
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                following = self._path.open("rb")
                text += self._file.read() + following.read()
                self._file.close()
                self._file = following
        return text

    def close(self) -> None:
        """Read no more."""
        self._file.close()


def _looks(pidfd: int | None) -> Iterator[None]:
    """Now and then, and once when the launcher writes no more."""
    while pidfd is not None and not select.select([pidfd], [], [], _FOLLOW_S)[0]:
        yield
    yield


def _show(text: bytes) -> None:
    if text:
        write_out(text.decode(errors="replace"))
