"""A listening Unix socket in a folder that its user alone may enter."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import time
from pathlib import Path
from typing import Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.instance import MAX_SOCKET_PATH_BYTES, private_folder
from kog_dist.runtime.port_holder import launcher_of, process_name
from kog_dist.runtime.wait import Deadline

_OTHERS_S: Final = 2.0  # for another start to have bound
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True, slots=True)
class SocketFile:
    """What a process has bound."""

    path: Path
    identity: tuple[int, int, int]

    def remove(self) -> None:
        """Delete it, unless somebody else's stands there by now."""
        with contextlib.suppress(OSError):
            if _identity(self.path) == self.identity:
                self.path.unlink()


def listen_on_file(path: Path, flag: str, backlog: int) -> tuple[socket.socket, SocketFile]:
    """Bind and listen, mode 0600. The folder is made with mode 0700, or must have it; a dead engine's socket is replaced.

    Raises ConfigError for a path that cannot be one, LaunchError for what is in the way.
    """
    path = _checked_path(path, flag)
    folder = private_folder(path.parent, f"choose a {flag} in another folder, which is made for it", is_ours=False)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder_fd = -1
    try:
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        _lock(folder_fd, path)
        _clear(path, flag)
        listener.bind(str(path))
        path.chmod(0o600)
        file = SocketFile(path, _identity(path))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise LaunchError(f"cannot listen on {path}: {error.strerror}; choose another {flag}") from None
    except BaseException:
        listener.close()
        raise
    finally:
        if folder_fd >= 0:
            os.close(folder_fd)
    listener.setblocking(False)
    return listener, file


def check_file(path: Path, flag: str) -> None:
    """Raise what `listen_on_file` would, but not for a socket that somebody listens on now. Leaves nothing behind."""
    path = _checked_path(path, flag)
    is_new = not os.path.lexists(path.parent)
    folder = private_folder(path.parent, f"choose a {flag} in another folder, which is made for it", is_ours=False)
    try:
        _check_kind(path, flag)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise LaunchError(f"cannot listen on {path}: {os.strerror(errno.EACCES)}; choose another {flag}")
    finally:
        if is_new:
            folder.rmdir()


def _checked_path(path: Path, flag: str) -> Path:
    path = Path(os.path.abspath(path))
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES or not str(path).isprintable():
        raise ConfigError(f"{flag} {str(path)!r} must be at most {MAX_SOCKET_PATH_BYTES} printable bytes, it has {length}")
    return path


def _check_kind(path: Path, flag: str) -> bool:
    """Whether a socket is there. Raises LaunchError for what is none."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise LaunchError(f"{path} is there and is no socket; choose another {flag}")
    return True


def _identity(path: Path) -> tuple[int, int, int]:
    """Which file it is: numbers of inodes are used again, so also since when."""
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def _lock(folder_fd: int, path: Path) -> None:
    """Of several starts one at a time looks and binds. Given up when the descriptor is closed."""
    deadline = Deadline.after(_OTHERS_S)
    while True:
        try:
            return fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline.expired():
                raise LaunchError(f"another process holds a lock of {path.parent}; choose another folder") from None
            time.sleep(0.01)


def _clear(path: Path, flag: str) -> None:
    """Remove what a dead engine left. Raises LaunchError for a socket that somebody listens on, and for what is no socket."""
    if not _check_kind(path, flag):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # one whose listener is busy lives
        reason = probe.connect_ex(str(path))
        if reason == errno.ECONNREFUSED:
            path.unlink()
        elif reason != errno.ENOENT:
            holder = "another process"
            if not reason:
                pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
                holder = process_name(launcher_of(pid))
            raise LaunchError(f"cannot listen on {path}: it is in use by {holder}; choose another {flag}")
