"""Writing to standard output and standard error, which may be closed, full, or read by somebody who has enough."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import TextIO, TypeVar, cast

from kog_dist.errors import KogError
from kog_dist.quoting import Verbatim, quoted

_Found = TypeVar("_Found")


class OutputError(KogError):
    """Standard output takes nothing (exit 3)."""


def check_stdout() -> None:
    """Raises OutputError if there is no standard output: better before a request than after it."""
    if sys.stdout is None:
        raise OutputError("standard output is closed; redirect it to a file or to /dev/null")


def write_out(text: str) -> None:
    """Write to standard output at once, quoted unless it is Verbatim.

    Raises BrokenPipeError if its reader has enough, OutputError for every other reason.
    """
    check_stdout()
    try:
        sys.stdout.write(quoted(text))
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)
        raise
    except (OSError, ValueError) as error:
        silence(sys.stdout)
        raise not_written(error) from None


def not_written(error: OSError | ValueError) -> OutputError:
    """What to say where standard output has refused a text."""
    reason = error.strerror if isinstance(error, OSError) else error
    return OutputError(f"standard output cannot be written: {reason}; send it somewhere else")


class _QuotedStream:
    """A stream as it is, but that nothing acts which is written to it, unless it is Verbatim."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(quoted(text))


class _CheckedStream(_QuotedStream):
    """The same, but that its failures are OutputErrors, or BrokenPipeErrors, and that the first one stays."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._failure: BrokenPipeError | OutputError | None = None  # whoever tries whether it can be written hides it

    def write(self, text: str) -> int:
        return self._checked(lambda: self._stream.write(quoted(text)))

    def flush(self) -> None:
        self._checked(self._stream.flush)

    def _checked(self, call: Callable[[], _Found]) -> _Found:
        if self._failure is not None:
            raise self._failure
        try:
            return call()
        except OSError as error:
            silence(self._stream)
            self._failure = error if isinstance(error, BrokenPipeError) else not_written(error)
            raise self._failure from None


@contextlib.contextmanager
def checked_stdout() -> Iterator[None]:
    """Around a command: what it prints is quoted, and raises OutputError if it cannot be written, also only at the end.

    A reader that has enough is BrokenPipeError, and at the end no failure.
    """
    stream, ending = sys.stdout, None
    if stream is None:
        yield
        return
    checked = _CheckedStream(stream)
    sys.stdout = cast(TextIO, checked)
    try:
        yield
    except SystemExit as ended:  # as typer and argparse end
        ending = ended
    except BaseException:  # what it says comes first
        with contextlib.suppress(BrokenPipeError, OutputError):
            checked.flush()
        raise
    finally:
        sys.stdout = stream
    with contextlib.suppress(BrokenPipeError):
        checked.flush()
    if ending is not None:
        raise ending


@contextlib.contextmanager
def quoted_streams() -> Iterator[None]:
    """`checked_stdout` around a command that prints what others have said, which may be on standard error, too."""
    stream = sys.stderr
    if stream is not None:
        sys.stderr = cast(TextIO, _QuotedStream(stream))
    try:
        with checked_stdout():
            yield
    finally:
        sys.stderr = stream


def write_error(line: str) -> None:
    """A line to standard error, if there is one that takes it; never to standard output. Quoted unless it is Verbatim."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(Verbatim(f"{quoted(line)}\n"))
        sys.stderr.flush()
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
                stream.write(Verbatim(f"\r\x1b[K{quoted(line)}"))
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
