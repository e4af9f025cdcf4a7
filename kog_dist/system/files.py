"""Files that other processes may look for, or read, while they are being written; and where those lie that outlive a run."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

EXIT_FILE: Final = "exit.json"  # among the logs: how the last run ended


def state_folder() -> Path:
    """What of this user outlives an engine: `kog` in `$XDG_STATE_HOME`, or ~/.local/state. Raises OSError: there is no home."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kog"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder, and XDG_STATE_HOME is not set") from None


def user_cache_folder() -> Path:
    """What of this user is only kept to save time: `kog_dist` in `$XDG_CACHE_HOME`, or ~/.cache. Raises OSError: no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kog_dist"
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder, and XDG_CACHE_HOME is not set") from None


def is_ours_alone(path: Path) -> bool:
    """Whether only this user and root can change what stands there, or on the way there. False for what is not there."""
    try:
        whole = path.resolve()
        for place in (whole, *whole.parents):
            info = place.stat()
            others = stat.S_IWOTH | (stat.S_IWGRP if info.st_gid != os.getegid() else 0)  # many users have a group of their own
            is_shared = info.st_mode & others and not (place != whole and info.st_mode & stat.S_ISVTX)
            if is_shared or info.st_uid not in (0, os.geteuid()):
                return False
    except OSError:
        return False
    return True


def log_folder(instance: str) -> Path:
    """Where an instance keeps its logs unless it is told where: they are there after its end. Raises OSError."""
    return state_folder() / "logs" / instance


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
