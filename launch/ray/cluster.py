"""The Ray cluster that engines are placed on: one that exists, or a private one on this machine that ends with the launcher.

`ray stop` ends every Ray process of the machine and is never called.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.ray_join import Say, first_line, import_ray, init_quietly, join, resolve_address

CLOSE_S = 5.0
OBJECT_STORE_BYTES = 80_000_000  # close to the least that Ray takes; nothing of ours goes through it
_NEEDED_BY = "--launcher ray"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one node has of a kind of resource, and how much of it is free."""

    address: str
    total: float
    free: float


@dataclass(frozen=True, slots=True)
class RayCluster:
    """A connection of this process to a cluster. Close it once."""

    is_private: bool
    version: str
    folder: Path  # for the files of a private one
    lifelines: tuple[int, ...]  # pidfds of the daemons here without which nothing goes: the raylet, and a private cluster's GCS

    @classmethod
    def connect(cls, address: str | None, num_ranks: int, folder: Path, say: Say) -> RayCluster:
        """Connect to the cluster that `resolve_address` finds, or start one with room for `num_ranks` and its files in `folder`.

        Changes the environment of this process: Ray reads how to authenticate when it is imported.
        Raises ConfigError, LaunchError.
        """
        found = resolve_address(address, os.environ, say)
        with contextlib.chdir(folder):  # actors import from the working directory, and Ray has no switch for that
            if found is not None:
                join(found, _NEEDED_BY)
            else:
                _start_private(num_ranks, folder, say)
        import ray

        return cls(found is None, ray.__version__, folder, _open_lifelines(is_private=found is None))

    def is_lost(self) -> bool:
        """Whether a daemon has died without which this process cannot talk to the cluster any more."""
        return bool(select.select(self.lifelines, [], [], 0)[0])

    def nodes(self, kind: str) -> list[NodeResources]:
        """What every living node has of CPU or GPU."""
        import ray
        from ray._private import state  # Ray has no public question for what is free on each node

        free = state.available_resources_per_node()
        return [
            NodeResources(
                str(node["NodeManagerAddress"]), node["Resources"].get(kind, 0.0), free.get(node["NodeID"], {}).get(kind, 0.0)
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def close(self) -> None:
        """Disconnect; a private cluster ends with that. From one that is lost there is nothing to disconnect: see `leave`."""
        import ray

        if not self.is_lost():
            run_bounded(ray.shutdown, CLOSE_S)
        elif self.is_private:
            _kill_daemons(self.folder)
        for fd in self.lifelines:
            os.close(fd)


def run_bounded(call: Callable[[], object], limit_s: float) -> None:
    """Make a call that tells Ray something and may wait for the dead; leave it to a thread after the limit."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(limit_s)


def _start_private(num_ranks: int, folder: Path, say: Say) -> None:
    ray = import_ray(_private_environment(), _NEEDED_BY)
    say(f"starting a private Ray {ray.__version__} on this machine")
    num_cpus = max(num_ranks, len(os.sched_getaffinity(0)))
    try:
        init_quietly(
            ray,
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder),
        )
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise LaunchError(f"a private Ray cluster could not be started: {first_line(error)}") from error


def _kill_daemons(folder: Path) -> None:
    """Kill what is left of a private cluster that has its files in `folder`."""
    import psutil  # type: ignore[import-untyped]

    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(str(folder) in word for word in child.cmdline()):
                child.kill()
                found.append(child)
    psutil.wait_procs(found, CLOSE_S)


def _open_lifelines(*, is_private: bool) -> tuple[int, ...]:
    """See `RayCluster.lifelines`. Raises LaunchError."""
    import psutil
    import ray

    own = ray.get_runtime_context().get_node_id()
    path = next(node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == own)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        own_gcs = [child.pid for child in psutil.Process().children() if child.name() == "gcs_server"] if is_private else []
        return tuple(os.pidfd_open(daemon) for daemon in (pid, *own_gcs))
    except OSError as error:
        ray.shutdown()
        raise LaunchError(f"the raylet of this machine cannot be reached at {path}: {error.strerror}") from error


def leave(exit_code: int) -> NoReturn:
    """End this process after the loss of its cluster: Ray's part of it would wait 10 s for the dead, or crash."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def shortfall(nodes: list[NodeResources], kind: str, count: int) -> str | None:
    """Why no node has `count` free right now, None if one has: `needs 8 GPUs on one node, best node has 6 free (10.0.0.7)`."""
    best = max(nodes, key=lambda node: (node.free, node.total), default=NodeResources("", 0, 0))
    if best.free >= count:
        return None
    what = f"needs {count} {kind}{'s' if count != 1 else ''} on one node"
    if not any(node.total for node in nodes):
        return f"{what}, and no node has any"
    in_all = f", {best.total:g} in all" if best.total > best.free else ""
    return f"{what}, best node has {best.free:g} free ({best.address}{in_all})"


def _private_environment() -> dict[str, str]:
    """A token of its own, and no reports to Ray's makers."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
