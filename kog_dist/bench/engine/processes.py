"""Processes that a benchmark starts, and those that were started together, found again by a variable that they inherit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from kog_dist.errors import LaunchError
from kog_dist.system import python_child

_READY_S, _POLL_S, _END_S = 30.0, 0.05, 10.0


def marked_processes(mark: str) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Pid, command line and environment of every other live process whose environment holds `mark` ("NAME=value")."""
    own, begin = str(os.getpid()), mark.encode()
    for pid in os.listdir("/proc"):
        if pid.isdigit() and pid != own:
            with contextlib.suppress(OSError):  # it may end while it is looked at; a zombie has no environment
                raw = _read(pid, "environ")
                if begin in raw and begin in raw.split(b"\0"):
                    words = raw.decode(errors="replace").split("\0")
                    environ = {name: value for name, _, value in (word.partition("=") for word in words)}
                    yield int(pid), command_line(int(pid)), environ


def parents() -> Iterator[tuple[int, int, int]]:
    """Of every live process its pid, its parent's, and when it started in clock ticks since boot."""
    for pid in os.listdir("/proc"):
        if pid.isdigit():
            with contextlib.suppress(OSError):
                state, parent, *others = _read(pid, "stat").rpartition(b")")[2].split()
                if state not in b"ZX":
                    yield int(pid), int(parent), int(others[17])


def command_line(pid: int) -> list[str]:
    """Its words; none of a process of the kernel's, and of a zombie. OSError if it is gone."""
    return _read(str(pid), "cmdline").decode(errors="replace").split("\0")[:-1]


def _read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:  # thousands of times a second while somebody waits
        return file.read()


@contextlib.contextmanager
def child_process(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m MODULE`, until the block ends: by SIGTERM, or by SIGKILL if that takes 10 s. Its standard input stays open until
    then. What it says of errors is shown only if the block raises something.
    """
    command = python_child.command(module, *arguments)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=tuple(pass_fds)
    ) as child:
        try:
            yield child
        except BaseException:
            child.kill()
            assert child.stderr is not None
            sys.stderr.write(child.stderr.read().decode(errors="replace"))
            raise
        finally:
            child.terminate()
            try:
                child.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                child.kill()


def wait_ready(condition: Callable[[], bool], children: Sequence[subprocess.Popen[bytes]], name: str) -> None:
    """Return once `condition` is true. Raises LaunchError naming `name` if one of `children` ends first, and after 30 s."""
    deadline_s = time.monotonic() + _READY_S
    while not condition():
        if any(child.poll() is not None for child in children) or time.monotonic() >= deadline_s:
            raise LaunchError(f"{name} did not become ready; see what it says above")
        time.sleep(_POLL_S)
