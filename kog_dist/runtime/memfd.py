"""Shared memory without a name: a sealed memfd that vanishes with its last user, so that no kill can leave it behind."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Any

from kog_dist.errors import LaunchError, remedy_of
from kog_dist.late_numpy import Array, np

PAGE_BYTES = 4096


def round_up(size_bytes: int, multiple: int = PAGE_BYTES) -> int:
    """The smallest multiple of `multiple` that is not below `size_bytes`."""
    return -(-size_bytes // multiple) * multiple


def available_bytes() -> int:
    """Memory that can be had without swapping or killing (MemAvailable)."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    raise LaunchError("/proc/meminfo does not say how much memory is available; a Linux kernel of 3.14 or newer is needed")


class Segment:
    """A mapped memfd of a whole number of pages. The creator passes `fd` to children (`pass_fds`); they map it with `from_fd`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.buffer = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))

    @classmethod
    def create(cls, name: str, size_bytes: int) -> Segment:
        """A zeroed segment of at least `size_bytes`.

        Its pages exist at once: memory that is not to be had raises LaunchError here and not SIGBUS later. The size is sealed, so
        that no peer can take pages away under a reader.
        """
        size_bytes = round_up(max(size_bytes, 1))
        available = available_bytes()
        if size_bytes > available:
            # A memfd has no limit of its own: allocating more than there is would call the kernel's OOM killer on anybody.
            raise LaunchError(f"cannot get {size_bytes} bytes of shared memory for {name}: only {available} bytes are available")
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            os.posix_fallocate(fd, 0, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            remedy = remedy_of(error, "free memory or raise the limit")
            raise LaunchError(f"cannot get {size_bytes} bytes of shared memory for {name}: {error.strerror}; {remedy}") from error

    @classmethod
    def from_fd(cls, fd: int) -> Segment:
        """Map what another process created; takes over `fd`, which must be a sealed memfd (LaunchError otherwise)."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            size_bytes = os.fstat(fd).st_size
        except OSError as error:
            raise LaunchError(f"descriptor {fd} is not shared memory of this engine: {error.strerror}") from error
        if not seals & fcntl.F_SEAL_SHRINK or size_bytes == 0 or size_bytes % PAGE_BYTES:
            raise LaunchError(f"descriptor {fd} is not shared memory of this engine: {size_bytes} bytes, seals {seals}")
        os.set_inheritable(fd, False)
        return cls(fd, size_bytes)

    def array(self, dtype: np.dtype[Any] | type, count: int, offset: int = 0) -> Array:
        """`count` items of `dtype` at `offset` bytes, shared with every process that maps the segment."""
        return np.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset)

    def words(self) -> memoryview:
        """The segment as 64-bit words; item access is one plain 8-byte load or store."""
        return memoryview(self.buffer).cast("Q")

    def close_fd(self) -> None:
        """Give up the descriptor and keep the mapping."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap and close. Views that are still alive keep the mapping until they are gone."""
        self.close_fd()
        try:
            self.buffer.close()
        except BufferError:
            pass  # somebody holds a view: the mapping goes with the view
