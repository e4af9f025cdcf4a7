"""Memory: how much there is, shared memory without and with names, memory that may be locked."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator

from kog_dist.doctor.cgroups import limit
from kog_dist.doctor.report import Finding, ok, problem, warning
from kog_dist.errors import LaunchError

_MIB, _GIB = 2**20, 2**30
_TRIAL_BYTES = _MIB
_LEAST_BYTES, _SCARCE_BYTES = 256 * _MIB, _GIB  # the demo model on two ranks takes 0.2 GiB
_SHM_BYTES = 128 * _MIB


def available() -> Iterator[Finding]:
    """What can be had without swapping, and what the container allows."""
    from kog_dist.runtime.memfd import available_bytes

    free = available_bytes()
    allowed = min((int(text) for text in limit("memory.max") if text != "max"), default=None)
    left = free if allowed is None else min(free, max(allowed - _held(), 0))
    details = {"available_bytes": left, "limit_bytes": allowed}
    within = "" if allowed is None else f" (this container may have {allowed / _GIB:.1f} GiB)"
    if left < _LEAST_BYTES:
        yield problem(f"{left / _MIB:.0f} MiB of memory are left{within}; stop other programs or raise the limit", **details)
    elif left < _SCARCE_BYTES:
        yield warning(f"only {left / _MIB:.0f} MiB of memory are left{within}; a larger model will not fit", **details)
    else:
        yield ok(f"{left / _GIB:.1f} GiB of memory available{within}", **details)


def _held() -> int:
    """Bytes of this container that cannot be given back: everything but the cache of files."""
    stat = dict(line.split() for text in limit("memory.stat")[:1] for line in text.splitlines())
    return sum(int(stat.get(name, 0)) for name in ("anon", "shmem", "kernel"))


def unnamed_shared() -> Iterator[Finding]:
    """memfd: what ranks of one machine share."""
    from kog_dist.runtime.memfd import Segment

    try:
        Segment.create("kog-doctor", _TRIAL_BYTES).close()
    except (LaunchError, OSError, AttributeError) as error:
        yield problem(f"shared memory (memfd) cannot be had: {error}; ask for a kernel or container that allows memfd_create")
    else:
        yield ok("shared memory without names (memfd) works")


def named_shared() -> Iterator[Finding]:
    """/dev/shm: what MPI libraries and Ray use."""
    try:
        size = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield warning(f"/dev/shm cannot be used ({error.strerror}), which MPI and Ray need; mount a tmpfs there")
        return
    details = {"total_bytes": size.total, "free_bytes": size.free}
    if size.free < _SHM_BYTES:
        yield warning(
            f"/dev/shm has {size.free / _MIB:.0f} MiB left, too little for MPI and Ray (local engines do not use it); start the "
            "container with --shm-size=1g, or clear it",
            **details,
        )
    else:
        yield ok(f"/dev/shm has {size.free / _GIB:.1f} of {size.total / _GIB:.1f} GiB left", **details)


def locked() -> Iterator[Finding]:
    """RLIMIT_MEMLOCK: engines lock nothing themselves, network cards of MPI and NCCL do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / _MIB:.0f} MiB"
    yield ok(f"memory that may be locked: {text} (engines lock none)", soft=soft, hard=hard)
