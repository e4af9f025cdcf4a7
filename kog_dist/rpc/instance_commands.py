"""`kog-client stop` and `kog-client logs`: an engine of this user on this machine, by its name. They need no answer of it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.records import dataclass
from kog_dist.rpc.log_tail import LogTail, log_names
from kog_dist.rpc.output import OutputError, check_stdout, progress_line, write_error, write_out
from kog_dist.runtime.folder_file import read_object
from kog_dist.runtime.instance import instances_root, is_stale
from kog_dist.runtime.launcher_file import LauncherFile, ask_to_stop
from kog_dist.system.files import EXIT_FILE, log_folder

STOP_MARGIN_S: Final = 20.0  # beside the time for the running request: that in which a launcher gives a process up, and more
FOLLOW_S: Final = 0.2
DEFAULT_LOG: Final = "launcher"


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
        return cls(name, folder, LauncherFile.read(folder) or _driver_of(name))

    def open_launcher(self) -> int | None:
        """A pidfd of its launcher, None if none runs here."""
        return None if self.launcher is None else self.launcher.open()


def _driver_of(name: str) -> LauncherFile | None:
    """The launcher of an engine that Ray has placed: such a launcher has a folder of its own. Raises ConfigError."""
    files = (LauncherFile.read(folder) for folder in instances_root().glob("ray-*"))
    found = [file for file in files if file is not None and file.instance == name]
    if len(found) > 1:
        others = " or ".join(f"ray-{file.pid}" for file in found)
        raise ConfigError(f"several launchers on Ray run an engine {name!r}; say which one: --instance {others}")
    return found[0] if found else None


def stop(instance: str | None, *, at_once: bool) -> int:
    """Have an engine end, and wait until it has. Returns the exit code. Raises LaunchError if there is none, or it does not."""
    check_stdout()
    engine = NamedEngine.find(instance)
    pidfd = engine.open_launcher()
    if pidfd is None or engine.launcher is None:
        raise LaunchError(_why_not(engine))
    launcher, begin_s = engine.launcher, time.monotonic()
    limit_s = stop_limit_s(launcher, at_once=at_once)
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
    sentence = None if launcher.log_dir is None else last_sentence(Path(launcher.log_dir))
    return stopped(engine.name, time.monotonic() - begin_s, sentence)


def stop_limit_s(launcher: LauncherFile, *, at_once: bool) -> float:
    """After which an engine that was asked to stop is not waited for any more."""
    return STOP_MARGIN_S + (0.0 if at_once else launcher.shutdown_timeout_s)


def stopped(name: str, took_s: float, sentence: str | None) -> int:
    """Say that an engine has, and what it has said of its end. Returns the exit code."""
    write_out(f"engine {name} has stopped after {took_s:.1f} s\n")
    if sentence is not None:
        write_error(f"kog-client: its last words: {sentence}")
    return 0


def _why_not(engine: NamedEngine) -> str:
    if engine.folder.is_dir() and not is_stale(engine.folder):
        return (
            f"engine {engine.name} was not started by a kog-launch of this machine; kog-client drain asks the engine itself, "
            "and on a Ray cluster --ray ADDRESS finds its launcher"
        )
    return (
        f"no engine of the name {engine.name!r} runs here; kog-client list shows those that do, "
        "--ray ADDRESS looks on a Ray cluster"
    )


def last_sentence(folder: Path) -> str | None:
    """What the run says of its end, if that was a failure."""
    sentence = (read_object(folder / EXIT_FILE) or {}).get("sentence")
    return sentence if isinstance(sentence, str) else None


def logs(instance: str | None, process: str | None, *, num_lines: int, follow: bool) -> int:
    """Print the last lines of a log, and with `follow` what comes, until the engine has ended. Returns the exit code.

    Raises LaunchError where there are no logs, ConfigError for a process that has none.
    """
    check_stdout()
    engine = NamedEngine.find(instance)
    pidfd = engine.open_launcher()
    try:
        path = _log_file(_folder_of(engine, is_running=pidfd is not None), process or DEFAULT_LOG)
        with closing(LogTail(path)) as tail:
            show(tail.last_lines(num_lines))
            for _ in _looks(pidfd) if follow else ():
                show(tail.news())
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
    names = log_names(folder)
    if process not in names:
        raise ConfigError(f"there is no log of {process!r} in {folder}; there are {', '.join(names) or 'none'}")
    return folder / f"{process}.log"


def _looks(pidfd: int | None) -> Iterator[None]:
    """Now and then, and once when the launcher writes no more."""
    while pidfd is not None and not select.select([pidfd], [], [], FOLLOW_S)[0]:
        yield
    yield


def show(text: bytes) -> None:
    """Print a part of a log."""
    if text:
        write_out(text.decode(errors="replace"))
