"""Engines that somebody else runs, on other hosts: known by their access files, which are read again while one is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.router.orders import FleetReport, ReplicaOrder
from kog_dist.rpc.transport import Access

READ_AGAIN_S: Final = 1.0  # a restarted engine has new keys, and a new file


@dataclass(slots=True)
class _Remote:
    name: str
    path: Path
    access: Access
    generation: int = 1


class RemoteReplicas:
    """The engines of `--remote-replicas`. This launcher starts, stops and drains none of them."""

    def __init__(self, files: str | None) -> None:
        """Read `a.json,b.json`. Raises LaunchError for a file that cannot be read."""
        paths = [Path(part.strip()) for part in (files or "").split(",") if part.strip()]
        self._remotes = [_Remote(f"x{i}", path, Access.from_file(path)) for i, path in enumerate(paths)]
        self._next_read_s = 0.0

    def __len__(self) -> int:
        return len(self._remotes)

    def orders(self) -> tuple[ReplicaOrder, ...]:
        """What the router shall use."""
        return tuple(ReplicaOrder(remote.name, remote.generation, remote.access) for remote in self._remotes)

    def look(self, report: FleetReport | None, now_s: float) -> None:
        """Read the files of engines that are not there: whoever started one again may have brought its new keys."""
        if now_s < self._next_read_s or report is None:
            return
        self._next_read_s = now_s + READ_AGAIN_S
        there = {replica.name for replica in report.replicas if replica.state in ("ready", "loading", "draining")}
        for remote in self._remotes:
            if remote.name not in there:
                self._read_again(remote)

    def _read_again(self, remote: _Remote) -> None:
        try:
            access = Access.from_file(remote.path)
        except LaunchError:
            return  # it is being copied, perhaps
        if access != remote.access:
            remote.access, remote.generation = access, remote.generation + 1
