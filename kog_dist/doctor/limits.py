"""Limits of this user and container: open files, processes, address space, and the system calls that supervision needs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from kog_dist.doctor.cgroups import limit
from kog_dist.doctor.report import Finding, ok, problem, warning

_LEAST_FILES, _GOOD_FILES = (
    128,
    1024,
)  # an engine of 8 ranks has 70 open in its launcher; every client takes some in the coordinator
_LEAST_ADDRESS_SPACE = 4 * 2**30
_LEAST_PROCESSES = 64


def open_files() -> Iterator[Finding]:
    """RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES:
        yield problem(f"only {soft} files may be open; raise it with ulimit -n {_GOOD_FILES}", soft=soft, hard=hard)
    elif soft < _GOOD_FILES:
        yield warning(
            f"only {soft} files may be open, so not many clients can connect; raise it with ulimit -n 4096", soft=soft, hard=hard
        )
    else:
        yield ok(f"open files: {soft}", soft=soft, hard=hard)


def processes() -> Iterator[Finding]:
    """RLIMIT_NPROC and the container's own limit, which counts threads too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    left = [int(most) - int(now) for most, now in zip(limit("pids.max"), limit("pids.current"), strict=False) if most != "max"]
    if left and min(left) < _LEAST_PROCESSES:
        yield warning(
            f"this container may start only {min(left)} more processes and threads; raise its pids limit", left=min(left)
        )
    elif 0 <= soft < _LEAST_PROCESSES:
        yield warning(f"this user may have only {soft} processes; raise it with ulimit -u 4096", soft=soft, hard=hard)
    else:
        yield ok(f"processes: {'unlimited' if soft == resource.RLIM_INFINITY else soft}", soft=soft, hard=hard)


def address_space() -> Iterator[Finding]:
    """RLIMIT_AS; weights are mapped, and CUDA reserves far more than it uses."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= soft < _LEAST_ADDRESS_SPACE:
        yield problem(f"a process may map only {soft / 2**30:.1f} GiB; raise it with ulimit -v unlimited", soft=soft)
    elif soft >= 0:
        yield warning(f"a process may map {soft / 2**30:.1f} GiB, and CUDA maps all GPUs' memory; ulimit -v unlimited", soft=soft)


def supervision() -> Iterator[Finding]:
    """pidfds, through which deaths are seen within milliseconds."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        yield problem(
            f"this kernel or sandbox has no pidfds ({error}); use Linux 5.3 or newer, and allow pidfd_open in containers"
        )
    else:
        yield ok("processes can be watched (pidfd)")
