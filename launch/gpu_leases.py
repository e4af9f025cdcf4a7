"""Who decodes on a GPU: an engine's launcher holds a flock on a file for each of its GPUs, so that no two engines share one.

Two kernels that wait for words would get the GPU in turns, and each would look hung to the other's watchdog. The files lie beside
the instance folders. A lease ends with the process that holds it, however that ends. Other programs, and other users' engines,
are seen by the memory that they take (`gpu_choice`), not by leases.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

from kog_dist.errors import LaunchError
from kog_dist.hardware.gpus import Gpu
from kog_dist.runtime.instance import LeaseHolder, holder_in, instances_root, write_holder
from kog_dist.runtime.wait import Deadline

_HANDOVER_S = 2.0  # a dead holder's descriptors may live for a moment; others look at a lease by locking it for an instant


class GpuLeases:
    """Leases of some GPUs; `close` gives them up."""

    def __init__(self, fds: Sequence[int] = ()) -> None:
        self._fds = list(fds)

    @classmethod
    def acquire(cls, gpus: Sequence[Gpu], root: Path | None = None) -> GpuLeases:
        """Take all of them. Raises LaunchError that names the first one which somebody else has, and who."""
        leases, deadline = cls(), Deadline.after(_HANDOVER_S)
        try:
            for gpu in gpus:
                file = _file(gpu.uuid, root)
                fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                leases._fds.append(fd)
                while not _try_lock(fd, fcntl.LOCK_EX):
                    holder = holder_in(file)
                    if (holder is not None and holder.alive()) or deadline.expired():
                        raise LaunchError(f"{gpu} {_used_by(holder)}")
                    time.sleep(0.01)
                write_holder(fd)
        except BaseException:
            leases.close()
            raise
        return leases

    def close(self) -> None:
        """Give them up. Does nothing the second time."""
        while self._fds:
            os.close(self._fds.pop())


def use_of(gpu: Gpu, root: Path | None = None) -> str:
    """Who decodes on a GPU, and what to do, as the end of a sentence; empty if nobody does. Changes nothing."""
    file = _file(gpu.uuid, root)
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return ""
    try:
        return "" if _try_lock(fd, fcntl.LOCK_SH) else _used_by(holder_in(file))
    finally:
        os.close(fd)


def _used_by(holder: LeaseHolder | None) -> str:
    return f"is used by {holder or 'another engine'}; stop it, or choose another GPU"


def _file(uuid: str, root: Path | None) -> Path:
    return (root or instances_root()) / f".{uuid}.lease"  # no instance's name begins with a dot


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
