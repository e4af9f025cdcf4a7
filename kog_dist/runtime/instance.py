"""The folder of a running engine: a 0700 directory for its sockets, and the lease that says who owns the name.

The lease is a flock on a file in the folder. The supervisor takes it and the coordinator inherits the descriptor, so the name
stays taken until both are gone, and whichever of them lives longer can `remove` the folder. What nobody could remove (both killed
at once) is swept by the next start: a folder whose lease is free belongs to nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kog_dist.errors import ConfigError, LaunchError, remedy_of
from kog_dist.records import dataclass
from kog_dist.runtime.folder_file import check_process, read_record
from kog_dist.runtime.wait import Deadline

LEASE_FILE = "lease"
MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux, less the final zero

NAME_PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # of an instance; means the same in POSIX's extended expressions

_NAME = re.compile(NAME_PATTERN)
_SPARE_FILES = 8  # descriptors for making a folder, watching it, and removing it should the rest fail
_HANDOVER_S = 2.0  # a dead holder's children may keep the lease for a moment


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who holds, or last held, a lease. `start_time` is the process's start in clock ticks since boot: pids are used again."""

    pid: int
    start_time: int
    command: str  # what may be shown of it, whatever the lease says

    def __post_init__(self) -> None:
        from kog_dist.runtime.command_line import shown_command

        check_process(self.pid, self.start_time)
        object.__setattr__(self, "command", shown_command(self.command.split()))

    def alive(self) -> bool:
        """Whether that very process still runs."""
        return process_start_time(self.pid) == self.start_time

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def process_start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot, None when there is no such process (or only a zombie of it)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])


def instances_root() -> Path:
    """The folder of all instance folders of this user: `$XDG_RUNTIME_DIR/kog`, else `kog-<uid>` among the temporary files.

    It is created with mode 0700. LaunchError when it exists and is not a directory of this user that nobody else can enter.
    """
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and os.path.isabs(runtime_dir) and os.access(runtime_dir, os.W_OK):
        return private_folder(Path(runtime_dir) / "kog")
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError:
        raise LaunchError(
            "no folder for the engine's sockets: neither XDG_RUNTIME_DIR nor TMPDIR nor /tmp can be written; set XDG_RUNTIME_DIR"
        ) from None
    return private_folder(Path(temporary) / f"kog-{os.getuid()}")


def private_folder(folder: Path, remedy: str = "set XDG_RUNTIME_DIR", *, is_ours: bool = True) -> Path:
    """The folder, made with mode 0700. Raises LaunchError when it is not a directory of this user that nobody else can enter.

    `is_ours`: its name is, so that nothing of somebody else's is lost with it.
    """
    status = None
    while status is None:
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise LaunchError(f"cannot create {folder} for the engine's sockets: {error.strerror}; {remedy}") from error
        with contextlib.suppress(FileNotFoundError):  # another start has just swept it away
            status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise LaunchError(
            f"{folder} must be a directory of user {os.getuid()} with mode 0700, and is {stat.filemode(status.st_mode)} of user "
            f"{status.st_uid}; {'remove it or ' if is_ours else ''}{remedy}"
        )
    return folder


class Removable(Protocol):
    """What can be deleted, such as a `SocketFile`."""

    def remove(self) -> None:
        """Delete it; nothing is raised."""


class Instance:
    """A name that this engine owns, and its folder. Close it, or remove it, exactly once per process that holds it."""

    def __init__(self, folder: Path, lease_fd: int) -> None:
        self.name = folder.name
        self.folder = folder
        self.lease_fd = lease_fd
        self.socket_file: Removable | None = None  # one elsewhere, which goes with the folder

    @classmethod
    def acquire(cls, name: str, root: Path | None = None) -> Instance:
        """Take the name, or raise LaunchError that says who has it. Clears away what a dead engine left under the name."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"instance name {name!r} must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"
            )
        folder = (root or instances_root()) / name
        deadline = Deadline.after(_HANDOVER_S)
        with _writing(folder):
            _check_spare_files()
        while True:
            with _writing(folder):
                fd = _lock(folder, create=True)
            if fd is not None:
                break
            holder = read_holder(folder)
            if (holder is not None and holder.alive()) or deadline.expired():
                who = str(holder) if holder else "another process"
                raise LaunchError(f"instance name {name!r} is taken by {who}; stop it or choose another --instance")
            time.sleep(0.01)
        instance = cls(folder, fd)
        try:
            with _writing(folder):
                _clear(folder)
                write_holder(fd)
        except LaunchError:
            instance.remove()
            raise
        return instance

    @classmethod
    def inherit(cls, folder: Path, lease_fd: int) -> Instance:
        """The same instance in a child that got `lease_fd` through `pass_fds`; the lock is shared with the parent."""
        os.set_inheritable(lease_fd, False)
        return cls(folder, lease_fd)

    def socket_path(self, leaf: str) -> Path:
        """Where to bind a socket. LaunchError when the path is longer than a socket address can be."""
        path = self.folder / leaf
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise LaunchError(
                f"socket path {path} has {len(os.fsencode(path))} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible; "
                "choose a shorter --instance or XDG_RUNTIME_DIR"
            )
        return path

    def loss(self) -> str | None:
        """How the name was lost while the engine ran, and what follows from that. None: it was not."""
        try:
            if _owns(self.folder, self.lease_fd):
                return None
        except OSError:  # the file system does not say
            return None
        if not self.folder.is_dir():
            return f"the instance folder {self.folder} was removed while the engine ran, so no client could reach it"
        holder = read_holder(self.folder)
        is_taken = holder is not None and holder.alive()
        what = f"and {holder} has taken its name" if is_taken else "so another one could take its name"
        return f"the lease {self.folder / LEASE_FILE} was removed while the engine ran, {what}"

    def remove(self) -> None:
        """Delete the folder with all that is in it, then give the name up. Does nothing where it was done already, and to the
        folder of a successor, who has the name because somebody removed the lease.
        """
        if self.lease_fd >= 0:
            with contextlib.suppress(OSError):
                if _owns(self.folder, self.lease_fd):
                    _delete(self.folder)
                elif (fd := _lock_lease(self.folder)) is not None:  # the lease was removed, and nobody has the name
                    _delete(self.folder)
                    os.close(fd)
            if self.socket_file is not None:
                self.socket_file.remove()
        self.close()

    def close(self) -> None:
        """Give up this process's hold and leave the folder as it is."""
        if self.lease_fd >= 0:
            os.close(self.lease_fd)
            self.lease_fd = -1


def write_holder(fd: int) -> None:
    """Write into a lease that this process holds it."""
    from kog_dist.runtime.command_line import own_command

    pid = os.getpid()
    text = json.dumps({"pid": pid, "start_time": process_start_time(pid), "command": own_command()})
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode(), 0)


def read_holder(folder: Path) -> LeaseHolder | None:
    """Who wrote the lease of an instance folder; None when nobody did, or the file cannot be read."""
    return holder_in(folder / LEASE_FILE)


def holder_in(lease: Path) -> LeaseHolder | None:
    """Who wrote a lease; None when nobody did, or the file cannot be read."""
    return read_record(LeaseHolder, lease)


def sweep_stale(root: Path | None = None) -> list[str]:
    """Delete every instance folder whose lease nobody holds; returns their names. Never touches a live engine's.

    A folder that cannot be looked into stays: it is no reason for another engine not to start.
    """
    swept = []
    for folder in sorted((root or instances_root()).iterdir()):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or not folder.is_dir():
                continue
            fd = _lock(folder, create=False)
            if fd is not None:
                _delete(folder)
                os.close(fd)
                swept.append(folder.name)
    return swept


def running(root: Path) -> list[str]:
    """Names of the instances in this folder that somebody holds; none where it cannot be looked into."""
    try:
        return sorted(path.name for path in root.iterdir() if (path / LEASE_FILE).is_file() and not is_stale(path))
    except OSError:
        return []


def is_stale(folder: Path) -> bool:
    """Whether nobody holds the lease of an instance folder. Changes nothing; a folder that cannot be looked into is not stale."""
    try:
        fd = os.open(folder / LEASE_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return folder.is_dir()
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # for as long as it takes to close it: a start would try again for seconds
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """What the system refuses of an instance folder, as a LaunchError."""
    try:
        yield
    except OSError as error:
        remedy = remedy_of(error, "free space there or set XDG_RUNTIME_DIR to another folder")
        raise LaunchError(f"the engine's folder {folder} cannot be written: {error.strerror}; {remedy}") from error


def _check_spare_files() -> None:
    """Raises OSError where a folder that was made could not be removed again for want of descriptors."""
    with contextlib.ExitStack() as stack:
        for _ in range(_SPARE_FILES):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _lock(folder: Path, *, create: bool) -> int | None:
    """A descriptor that holds the folder's lease, or None when somebody else does (or just deleted it)."""
    if create:
        private_folder(folder)
    elif not (folder / LEASE_FILE).exists():
        return _lock_empty(folder)
    return _lock_lease(folder)


def _lock_lease(folder: Path) -> int | None:
    """The same where the folder is there, or was a moment ago; makes the lease if there is none."""
    try:
        fd = os.open(folder / LEASE_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _owns(folder, fd):  # else the file was deleted between open and flock: the lock means nothing
            return fd
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _lock_empty(folder: Path) -> int | None:
    """A folder without a lease is left over from a crash between two steps; remove it when it is empty."""
    try:
        folder.rmdir()
    except OSError:
        pass
    return None


def _owns(folder: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(folder / LEASE_FILE, follow_symlinks=False), os.fstat(fd))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _clear(folder: Path) -> None:
    """Delete everything in the folder but the lease. The caller holds the lease."""
    for leaf in os.listdir(folder):
        path = folder / leaf
        if leaf == LEASE_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _delete(folder: Path) -> None:
    """Delete a folder whose lease the caller holds. The lease goes last, so that a half-deleted folder is seen to be stale."""
    try:
        _clear(folder)
        (folder / LEASE_FILE).unlink(missing_ok=True)
        folder.rmdir()
    except FileNotFoundError:
        pass  # the other holder of a shared lease has deleted it at the same time
    except OSError:
        pass  # somebody has just taken the name anew: the folder is theirs
