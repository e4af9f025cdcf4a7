"""Processes that were started together, found again by a variable that they inherit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def marked_processes(mark: str) -> Iterator[tuple[int, list[str], dict[str, str]]]:
    """Pid, command line and environment of every other live process whose environment holds `mark` ("NAME=value")."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it may end while it is looked at; a zombie has no environment
                raw = (entry / "environ").read_bytes()
                if mark.encode() in raw.split(b"\0"):
                    words = raw.decode(errors="replace").split("\0")
                    environ = {name: value for name, _, value in (word.partition("=") for word in words)}
                    command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                    yield int(entry.name), command, environ
