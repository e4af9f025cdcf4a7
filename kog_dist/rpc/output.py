"""Writing to standard output and standard error, which may be closed, full, or read by somebody who has enough."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from kog_dist.errors import KogError


class OutputError(KogError):
    """The answer cannot be written to standard output (exit 3)."""


def check_stdout() -> None:
    """Raises OutputError if there is no standard output: better before a request than after it."""
    if sys.stdout is None:
        raise OutputError("the answer cannot be written: standard output is closed; redirect it to a file or to /dev/null")


def write_out(text: str) -> None:
    """Write to standard output at once. Raises BrokenPipeError if its reader has enough, OutputError for every other reason."""
    check_stdout()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        raise
    except (OSError, ValueError) as error:
        silence(sys.stdout)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise OutputError(f"the answer cannot be written to standard output: {reason}; send it somewhere else") from None


def write_error(line: str) -> None:
    """One line to standard error, if there is one that takes it; never to standard output."""
    if sys.stderr is None:
        return
    try:
        print(line, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        silence(sys.stderr)


@contextlib.contextmanager
def progress_line(*, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A function that shows one line on a standard error that is a terminal, in place of the last one; "" takes it away."""
    stream = sys.stderr if enabled and sys.stderr is not None and sys.stderr.isatty() else None
    shown = ""

    def show(line: str) -> None:
        nonlocal shown
        if stream is not None and line != shown:
            with contextlib.suppress(OSError, ValueError):
                stream.write(f"\r\x1b[K{line}")
                stream.flush()
            shown = line

    try:
        yield show
    finally:
        show("")


def silence(stream: TextIO) -> None:
    """Let what is still in the buffer go nowhere, or it fails again, with a trace, when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, stream.fileno())
        os.close(null_fd)
