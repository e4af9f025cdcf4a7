"""The instance of a fleet: its name, its folder, and the reaper that removes both should the launcher be killed."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from kog_dist.launch.instance_watch import InstanceWatch
from kog_dist.launch.reaper import Reaper, acquire_watched
from kog_dist.runtime.instance import process_start_time, sweep_stale
from kog_dist.runtime.socket_file import SocketFile


class FleetFolder:
    """Enter it before any thread exists; leaving it gives everything back."""

    def __init__(self, name: str, socket_file: SocketFile | None = None) -> None:
        """Take the name; `socket_file` goes with it. Raises LaunchError that says who has it, ConfigError for what is no name."""
        sweep_stale()
        self._lease, self._reaper = acquire_watched(name, socket_file)
        self._watch = InstanceWatch(self._lease)
        self._pids: dict[int, int | None] = {}  # with their start time: pids are used again

    def __enter__(self) -> FleetFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._lease.remove()
        self._reaper.dismiss()

    @property
    def name(self) -> str:
        """The instance name."""
        return self._lease.name

    @property
    def path(self) -> Path:
        """The folder."""
        return self._lease.folder

    @property
    def lease_fd(self) -> int:
        """Descriptor of the lease, for processes that hold the name too."""
        return self._lease.lease_fd

    def loss(self) -> str | None:
        """A sentence once no client could find the fleet because somebody removed its folder, or the lease in it."""
        return self._watch.look()

    def watch(self, pid: int) -> None:
        """From now on `pid`, a child of this process, is killed if this process dies."""
        self._pids[pid] = process_start_time(pid)
        self._reaper.watch(pid)

    def mend(self) -> int | None:
        """Start the reaper again if somebody has killed it: pid of the one that is gone, None if all is well."""
        if not self._reaper.has_ended():
            return None
        gone = self._reaper.pid
        self._reaper = Reaper.start(self._lease)
        self._pids = {pid: start_time for pid, start_time in self._pids.items() if process_start_time(pid) == start_time}
        for pid in self._pids:
            self._reaper.watch(pid)
        return gone
