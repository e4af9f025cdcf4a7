"""The router's process: started, told what to do, heard, and started again when it was killed."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Sequence

from kog_dist import env
from kog_dist.config import LaunchConfig
from kog_dist.launch import local
from kog_dist.launch.events import EventLog
from kog_dist.launch.liveness import WatchedChild
from kog_dist.launch.local import Child
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_OK, EXIT_RANK_DIED, EXIT_TIMEOUT, Outcome, signal_name
from kog_dist.launch.replicas.fleet_folder import FleetFolder
from kog_dist.launch.restarts import RestartBudget
from kog_dist.router.args import RouterArgs
from kog_dist.router.orders import FleetOrder, FleetReport, ReplicaOrder, latest_packet, socket_pair
from kog_dist.runtime.process_page import ProcessPage


class RouterProcess:
    """The router of a fleet. `report`: what it said last; None before."""

    def __init__(self, settings: LaunchConfig, folder: FleetFolder, events: EventLog) -> None:
        self._settings, self._folder, self._events = settings, folder, events
        self._watched: WatchedChild | None = None
        self._orders: socket.socket | None = None
        self._last_order = b""
        self._restarts = RestartBudget()
        self.report: FleetReport | None = None

    def start(self) -> None:
        """Start it. Raises LaunchError if no process can be started."""
        ours, theirs = socket_pair()
        with theirs:
            self._watched = WatchedChild(functools.partial(self._spawn, theirs.fileno()), self._settings.stall_timeout)
        self._folder.watch(self._watched.child.pid)
        self._orders, self._last_order = ours, b""

    def _spawn(self, orders_fd: int, page: ProcessPage) -> Child:
        arguments = RouterArgs(
            self._folder.name,
            str(self._folder.path),
            self._folder.lease_fd,
            orders_fd,
            self._settings.shutdown_timeout,
            self._settings.rpc_port,
            self._settings.rpc_host,
            page.fd,
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith(env.PREFIX)}
        return local.spawn(
            "router",
            "kog_dist.router.process",
            [arguments.to_json()],
            environment=environment,
            pass_fds=(orders_fd, self._folder.lease_fd, page.fd),
            log_dir=self._events.log_dir,
        )

    def wake_fds(self) -> set[int]:
        """What becomes readable when it has something to say, or has ended."""
        fds = {self._orders.fileno()} if self._orders is not None else set()
        if self._watched is not None:
            fds |= {fd for fd in (self._watched.child.ended_fd, self._watched.child.stderr_fd) if fd >= 0}
        return fds

    def read_output(self) -> None:
        """Pass on what it has printed."""
        if self._watched is not None:
            self._watched.child.read_output()

    def talk(self, replicas: Sequence[ReplicaOrder], *, is_draining: bool) -> None:
        """Send it what it shall do, if that has changed, and read what it has seen."""
        if self._orders is None:
            return
        order = FleetOrder(tuple(replicas), is_draining).to_bytes()
        with contextlib.suppress(BlockingIOError, ConnectionError):  # it is busy, or gone, which is seen elsewhere
            if order != self._last_order:
                self._orders.send(order)
                self._last_order = order
        with contextlib.suppress(EOFError):
            if (packet := latest_packet(self._orders)) is not None:
                self.report = FleetReport.from_bytes(packet)

    def ended(self, *, has_served: bool) -> Outcome | None:
        """Kill it if it is silent, and start it again if it was killed; an outcome when it was drained, or dies too often.

        One that ends by itself before the fleet `has_served` would do so again.
        """
        assert self._watched is not None
        child = self._watched.child
        self._watched.look()
        code = child.exit_code
        if code is None:
            return None
        child.read_output()
        if code == EXIT_OK:
            return Outcome(EXIT_OK, "drained")
        if code == EXIT_TIMEOUT:
            sentence = f"running requests did not finish within {self._settings.shutdown_timeout:g} s and were ended"
            return Outcome(EXIT_TIMEOUT, "drain_timeout", sentence)
        said = child.last_line().removeprefix("router: ")
        why = said if said and code > 0 else f"the router (pid {child.pid}) {self._watched.how_it_ended()}"
        if (not has_served and code > 0) or not self._restarts.take():
            exit_code = EXIT_RANK_DIED if has_served else EXIT_CANNOT_START
            return Outcome(exit_code, "router_died", why, pid=child.pid, signal=signal_name(code))
        self._events.say(f"{why}; its clients have lost their requests, and it is started again", error=True)
        self.close()
        self.start()
        return None

    def begin_stop(self) -> None:
        """Ask it to end: it tells its clients."""
        if self._watched is not None:
            self._watched.begin_stop()

    def close(self) -> None:
        """End it now."""
        if self._watched is not None:
            self._watched.kill()
        if self._orders is not None:
            self._orders.close()
        self._watched = self._orders = None
