"""`kog-launch --detach`: the launcher goes on in the background, and who has called it learns how its start went.

The process forks before it has done anything. The child is the launcher: it still has the terminal, shows its progress and says
why it cannot start. Once the engine is ready it lets go of the terminal and tells the parent, which ends with 0; where the child
ends before that, with the child's code. Until then each end of the parent, and a stop signal to it, is one of the child.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from types import FrameType
from typing import Final

from kog_dist.errors import LaunchError
from kog_dist.launch.events import EventLog, say, silence
from kog_dist.launch.outcome import EXIT_OK, EXIT_TIMEOUT
from kog_dist.launch.signals import heeded
from kog_dist.system.parent_death import outlive_parent, stop_with_parent

MARGIN_S: Final = 60.0  # a launcher knows best why it is not ready, and says so after its own limit


class _State:
    """Of this process: where to tell that the engine is ready; -1: nobody waits for that."""

    ready_fd = -1


def is_detached() -> bool:
    """Whether this launcher will let go of its terminal, or has."""
    return _State.ready_fd >= 0


def begin(limit_s: float) -> int | None:
    """Go on as a launcher in the background, where this is None; elsewhere the exit code, once it is ready or has ended.

    Call it before any thread exists. `limit_s`: after which the launcher should have given its start up.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent_pid = os.getpid()
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(write_fd)
        try:
            return _wait(pid, read_fd, limit_s + MARGIN_S)
        finally:
            os.close(read_fd)
    os.close(read_fd)
    os.setsid()  # what happens to the terminal does not happen to it
    if not stop_with_parent(parent_pid):
        os._exit(EXIT_TIMEOUT)
    _State.ready_fd = write_fd
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.dup2(null, 0)
    os.close(null)
    return None


def _wait(pid: int, read_fd: int, limit_s: float) -> int:
    def pass_on(signum: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)

    for signum in heeded():
        signal.signal(signum, pass_on)
    if not select.select([read_fd], [], [], limit_s)[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        say(f"kog-launch: the launcher (pid {pid}) has said nothing for {limit_s:g} s and was killed", error=True)
        return EXIT_TIMEOUT
    if os.read(read_fd, 1):
        return EXIT_OK
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        say(f"kog-launch: the launcher (pid {pid}) was killed by {signal.Signals(-code).name}", error=True)
    return code if code >= 0 else 128 - code


def check_logs(events: EventLog) -> None:
    """Raises LaunchError if nobody could learn what a launcher in the background says."""
    if is_detached() and events.log_dir is None:
        raise LaunchError(f"with --detach an engine is heard only in its logs, and they are {events.without}")


def ready() -> None:
    """The engine is ready, and all that the terminal shall show is shown. Nothing happens to a launcher that is not detached."""
    if _State.ready_fd < 0:
        return
    outlive_parent()
    silence("stdout")
    silence("stderr")
    with contextlib.suppress(OSError):  # nobody waits any more
        os.write(_State.ready_fd, b"1")
