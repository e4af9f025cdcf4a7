"""Files that other processes may look for, or read, while they are being written."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_at_once(path: Path, content: bytes, *, is_private: bool = False) -> None:
    """Write a file so that whoever looks finds the old one, none, or the whole new one; of several writers the last one wins.

    `is_private`: mode 0600. Raises OSError, and leaves nothing behind.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if is_private else 0o666)
        with os.fdopen(fd, "wb") as stream:
            stream.write(content)
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
