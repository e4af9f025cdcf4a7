"""Replicas that Ray places: each a gang of actors on a node that has room, in a placement group of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kog_dist.config import LaunchConfig
from kog_dist.launch.outcome import Outcome
from kog_dist.launch.ray.cluster import RayCluster
from kog_dist.launch.ray.gang import RayGang, choose_ray_target
from kog_dist.launch.replicas.places import Replica, StartReplica, replica_instance
from kog_dist.rpc.transport import Access
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.ray_join import Say

_POLL_EVERY_S: Final = 0.1  # a question to Ray takes about a millisecond


@contextlib.contextmanager
def ray_replicas(settings: LaunchConfig, launcher: LauncherFile, folder: Path, say: Say) -> Iterator[StartReplica]:
    """Connect to the cluster, or start a private one with its files in `folder`; what starts a replica on it.

    Changes the environment of this process, and starts threads in it. Raises ConfigError, CheckpointError, LaunchError.
    """
    target = choose_ray_target(settings)
    most = settings.max_replicas or settings.replicas
    cluster = RayCluster.connect(settings.ray_address, most * target.world_size, folder, say)

    def start(name: str, generation: int) -> Replica:
        instance = replica_instance(launcher.instance, name)
        return RayReplica(RayGang(cluster, settings, target, launcher, instance=instance, generation=generation))

    try:
        yield start
    finally:
        cluster.close()


class RayReplica:
    """One generation of a replica on the cluster (see `Replica`)."""

    def __init__(self, gang: RayGang) -> None:
        self._gang = gang
        self._next_poll_s = 0.0
        self._is_closed = False

    @property
    def outcome(self) -> Outcome | None:
        """How it ended."""
        return self._gang.outcome

    @property
    def access(self) -> Access | None:
        """How to reach it, once it is ready."""
        return self._gang.access

    @property
    def doing(self) -> str:
        """What its start waits for."""
        return self._gang.doing

    def poll(self) -> list[str]:
        """See `Replica`."""
        now_s = time.monotonic()
        if self._is_closed or now_s < self._next_poll_s:
            return []
        self._next_poll_s = now_s + _POLL_EVERY_S
        return [line.text for line in self._gang.poll(0.0)]

    def wake_fds(self) -> list[int]:
        """See `Replica`; Ray has no descriptor to wait for."""
        return []

    def begin_stop(self, *, drain: bool) -> None:
        """See `Replica`."""
        self._gang.begin_stop(drain=drain)

    def close(self) -> None:
        """See `Replica`."""
        if not self._is_closed:
            self._is_closed = True
            self._gang.close()
