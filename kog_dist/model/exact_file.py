"""Files of weights: opened without waiting, read in full or with an error that says what was being read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from kog_dist.errors import CheckpointError
from kog_dist.foreign_file import open_fd

_POINTER = b"version https://git-lfs.github.com/spec/"
_LEAST_OF_POINTER = 8
FileIdentity: TypeAlias = tuple[int, int, int, int]  # tells if a file was replaced or changed


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read a file from. Raises CheckpointError naming it."""
    try:
        fd = open_fd(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def refuse_pointer(path: Path, start: bytes | bytearray) -> None:
    """Raise CheckpointError if a file that begins so is what Git leaves in the place of a large one."""
    if start and _POINTER.startswith(start[: len(_POINTER)]) and len(start) >= _LEAST_OF_POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer, not the file itself; `git lfs pull` in its folder, or `hf download`, fetches it"
        )


def file_identity(fd: int) -> FileIdentity:
    """Device, inode, size and time of change; zeros for what is no regular file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return (0, 0, 0, 0)  # no size: refused by the header's bounds
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def read_exactly(path: Path, fd: int, target: memoryview, offset: int, what: str) -> None:
    """Fill `target` from an offset on. Raises CheckpointError, which says `what` was being read, also if the file ends before."""
    wanted, got = len(target), 0
    while got < wanted:
        try:
            count = os.preadv(fd, [target[got:]], offset + got)
        except OSError as error:
            raise CheckpointError(f"{path}: reading {what} failed: {error.strerror}") from None
        if count == 0:
            raise CheckpointError(
                f"{path} ends inside {what}: {got} of {wanted} bytes at offset {offset}; it is truncated, copy it again"
            )
        got += count
