"""The one way to open a file that somebody else has named or made: it is a file, and no more is read of it than is wanted.

A FIFO would keep its opener waiting for ever, a device may act when it is opened, and some files have no end. Whoever opens one
of those here is told at once, by an OSError whose `strerror` says what it is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from kog_dist.errors import remedy_of

TEXT_BYTES: Final = 1 << 28  # of a text, prompts or figures that a command is given
_KINDS: Final = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_CHUNK_BYTES: Final = 1 << 20


def open_fd(path: Path, *, follows_link: bool = True) -> int:
    """A descriptor to read a regular file from; the caller closes it. Raises OSError.

    A read that would have to wait, as in a file of the kernel's that has nothing to say yet, fails.
    """
    link = 0 if follows_link else os.O_NOFOLLOW
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC | link)  # does not open it: nothing waits, and no device acts
        try:
            _check(os.fstat(place).st_mode, path)
            return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(place)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise OSError(errno.EMFILE, f"{error.strerror}; {remedy_of(error)}", str(path)) from None
        raise


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """The same as a stream without a buffer of its own."""
    with os.fdopen(open_fd(path), "rb", buffering=0) as stream:
        yield stream


def append_fd(path: Path) -> int:
    """A descriptor to append to a regular file, made with mode 0600 where there is none. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
    if os.path.lexists(path):
        _check(os.stat(path).st_mode, path)
    fd = os.open(path, flags, 0o600)
    try:
        _check(os.fstat(fd).st_mode, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_file(path: Path, most_bytes: int) -> bytes:
    """All of a file that has at most so many bytes. Raises OSError."""
    with opened(path) as stream:
        return read_rest(stream, path, most_bytes)


def read_rest(stream: FileIO, path: Path, most_bytes: int) -> bytes:
    """The same of one that is `opened` already."""
    chunks, left = [], most_bytes + 1
    while left > 0 and (chunk := os.read(stream.fileno(), min(left, _CHUNK_BYTES))):
        chunks.append(chunk)
        left -= len(chunk)
    if left <= 0:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return b"".join(chunks)


def read_text(path: Path, most_bytes: int = TEXT_BYTES) -> str:
    """All of a file of UTF-8 text. Raises OSError, also for what is no text."""
    try:
        return read_file(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is not UTF-8 text ({error.reason} at byte {error.start})", str(path)) from None


def _check(mode: int, path: Path) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFREG:
        return
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if kind == stat.S_IFLNK:
        raise OSError(errno.ELOOP, "it is a link", str(path))
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", str(path))
