"""`kog-launch --launcher ray`: one engine on one node of a Ray cluster, started again as a new generation when it is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from kog_dist.config import LaunchConfig
from kog_dist.errors import KogError
from kog_dist.launch import detach, local
from kog_dist.launch.banner import facts_of, show_banner
from kog_dist.launch.events import EventLog
from kog_dist.launch.http import EngineOfGateway, HttpGateway
from kog_dist.launch.instance_watch import InstanceWatch
from kog_dist.launch.outcome import EXIT_OK, EXIT_RANK_DIED, INTERRUPTED, Outcome, client_outcome
from kog_dist.launch.preflight import preflight
from kog_dist.launch.progress import StartupProgress
from kog_dist.launch.ray.cluster import RayCluster, leave
from kog_dist.launch.ray.gang import RayGang, choose_ray_target
from kog_dist.launch.reaper import Reaper, acquire_watched
from kog_dist.launch.restarts import RestartBudget
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.target import Target
from kog_dist.records import dataclass
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.rpc.transport import Access
from kog_dist.runtime.instance import sweep_stale
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.socket_file import SocketFile
from kog_dist.runtime.wait import Deadline
from kog_dist.system.files import write_at_once

STOP_MARGIN_S = 5.0  # for an engine that was told to stop to say that it has
_POLL_S = 0.1
_FOLDER_LOST = "driver_folder_lost"  # not that of the engine, where the engine runs: with that one a new generation begins
_CLUSTER_LOST = "Ray's daemons on the launcher's machine died, and with them the way to the engine; the engine was stopped"


def supervise(settings: LaunchConfig, request: PromptRequest | None) -> int:
    """Run an engine on the cluster until it is told to stop, or until `request` is answered. Returns the exit code.

    Raises KogError for what is wrong before the cluster was asked for anything.
    """
    with StopSignals() as signals, EventLog.of_run(settings, serves=request is None) as events, contextlib.ExitStack() as stack:
        try:
            preflight(settings, serves=request is None)
            http = HttpGateway.open(settings) if request is None else None
            if http is not None:
                stack.callback(http.close)
            detach.check_logs(events)
            target = choose_ray_target(settings)
            with driver_folder(None if http is None else http.socket_file) as place:
                if http is not None:
                    folder = EngineOfGateway(target.folder, target.model_name, place.path, place.path / ACCESS_NAME)
                    http.start(folder, events.log_dir)
                launcher = RayLauncher(settings, target, request, place, signals, events, http)
                outcome = launcher.run()
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
            events.note(str(error))
            outcome.write(events.log_dir, settings.instance)
            raise
        if outcome.sentence is not None and outcome.user_knows:
            events.note(outcome.sentence)
        elif outcome.sentence is not None:
            events.say_end(outcome.sentence)
        events.note(f"exit code {outcome.exit_code}: {outcome.reason}")
        outcome.write(events.log_dir, settings.instance)
    if launcher.has_lost_cluster:
        leave(outcome.exit_code)
    return outcome.exit_code


@dataclass(frozen=True, slots=True)
class DriverFolder:
    """A folder of this process, for a private cluster's files and a remote engine's key; `reaper` removes it if need be."""

    path: Path
    reaper: Reaper
    watch: InstanceWatch


@contextlib.contextmanager
def driver_folder(socket_file: SocketFile | None = None) -> Iterator[DriverFolder]:
    """Make the folder, and take it away. Call it before any thread exists, so before Ray is imported. Raises LaunchError."""
    sweep_stale()
    lease, reaper = acquire_watched(f"ray-{os.getpid()}", socket_file)
    try:
        yield DriverFolder(lease.folder, reaper, InstanceWatch(lease))
    finally:
        lease.remove()
        reaper.dismiss()


class RayLauncher:
    """The driver of one engine: one gang after the other."""

    def __init__(
        self,
        settings: LaunchConfig,
        target: Target,
        request: PromptRequest | None,
        place: DriverFolder,
        signals: StopSignals,
        events: EventLog,
        http: HttpGateway | None = None,
    ) -> None:
        self._settings, self._target, self._request, self._place = settings, target, request, place
        self._http = http
        self._signals, self._events = signals, events
        self._instance = settings.instance or ("default" if request is None else f"prompt-{os.getpid()}")
        self._file = LauncherFile.of_this_process(self._instance, settings.shutdown_timeout, events.log_dir)
        self._begin_s = time.monotonic()
        self.has_lost_cluster = False
        self._progress = StartupProgress(under_starter=True)
        self._restarts = RestartBudget()
        self._client: local.Child | None = None
        self._client_outcome: Outcome | None = None
        self._stop_deadline: Deadline | None = None
        self._num_handled_signals = 0

    def run(self) -> Outcome:
        """Connect, run generations of the engine, and return how the last one ended."""
        self._file.write(self._place.path)
        try:
            cluster = RayCluster.connect(
                self._settings.ray_address, self._target.world_size, self._place.path, self._progress.show
            )
        finally:
            self._progress.clear()
        generation = 1
        try:
            while True:
                outcome, was_ready = self._run_generation(cluster, generation)
                is_ours = outcome.exit_code != EXIT_OK and self._request is None and not self._signals.count
                is_lost = cluster.is_lost() or outcome.reason == _FOLDER_LOST
                if not is_ours or is_lost or not (was_ready or generation > 1):
                    return outcome
                if not self._restarts.take():
                    return replace(outcome, sentence=f"{outcome.sentence}; it is not started again after {self._restarts}")
                generation += 1
                self._events.say(f"{outcome.sentence}; starting it again as generation {generation}", error=True)
        finally:
            if self._http is not None:
                self._http.begin_stop()
            self._end_client()
            self.has_lost_cluster = cluster.is_lost()
            cluster.close()

    # ---- one generation ----
    def _run_generation(self, cluster: RayCluster, generation: int) -> tuple[Outcome, bool]:
        """How it ended, and whether it had been ready."""
        if self._signals.count:
            return self._interrupted(), False
        begin_s, was_ready = self._begin_s if generation == 1 else time.monotonic(), False
        gang = RayGang(cluster, self._settings, self._target, self._file, instance=self._instance, generation=generation)
        try:
            while gang.outcome is None:
                lines = gang.poll(_POLL_S)
                if not was_ready:
                    self._progress.show(gang.doing)
                if gang.is_ready and not was_ready:
                    was_ready = True
                    self._progress.clear()
                    self._announce(gang, cluster, time.monotonic() - begin_s)
                for line in lines:
                    if line.is_error or self._request is None:
                        self._events.say(line.text, error=line.is_error)
                self._look_at_client(gang)
                if self._http is not None and (ended := self._http.look(self._events.say, has_served=was_ready)) is not None:
                    return ended, was_ready
                if cluster.is_lost():
                    return self._of_both(Outcome(EXIT_RANK_DIED, "cluster_lost", _CLUSTER_LOST)), was_ready
                if (ended := self._folder_lost()) is not None:
                    return ended, was_ready
                if (ended := self._answer_signals(gang)) is not None:
                    return ended, was_ready
            return self._of_both(gang.outcome), was_ready
        finally:
            self._progress.clear()
            gang.close()

    def _folder_lost(self) -> Outcome | None:
        """The gateway and clients here would not find the engine's key any more; one client of one request has it."""
        if self._request is not None or self._stop_deadline is not None or (sentence := self._place.watch.look()) is None:
            return None
        return Outcome(EXIT_RANK_DIED, _FOLDER_LOST, sentence)

    def _of_both(self, ended: Outcome) -> Outcome:
        """The client's end, unless the engine failed it."""
        if self._client_outcome is None or (ended.exit_code != EXIT_OK and not ended.reason.startswith(INTERRUPTED)):
            return ended
        return self._client_outcome

    def _announce(self, gang: RayGang, cluster: RayCluster, took_s: float) -> None:
        assert gang.access is not None
        if gang.access.server_public is not None or self._http is not None:
            self._write_key(gang.access)
        if self._request is not None:
            self._start_client(gang.access, self._request)
            return
        size = self._target.world_size
        where = f"Ray {cluster.version}, {'private, ' if cluster.is_private else ''}node {gang.node}"
        key = f", --key-file {self._place.path / ACCESS_NAME}" if gang.access.server_public is not None else ""
        if gang.generation > 1:
            self._events.say(
                f"generation {gang.generation} on node {gang.node}, {gang.access.address}, ready after {took_s:.1f} s"
            )
            return
        url = f", {self._http.url}" if self._http is not None else ""
        self._events.say(
            f"{self._target.model_name} on {size} rank{'s' if size > 1 else ''} ({gang.kind}; {where}), instance "
            f"{gang.instance}, {gang.access.address}{key}{url}, ready after {took_s:.1f} s"
        )
        facts = {**facts_of(self._target), "devices": f"{size} x {gang.kind}; {where}"}
        show_banner(self._settings, None if self._http is None else self._http.url, facts, self._events)
        detach.ready()

    def _write_key(self, access: Access) -> None:
        """Keep a copy of the key here, for clients on this machine."""
        content = json.dumps({name: value for name, value in asdict(access).items() if value is not None})
        write_at_once(self._place.path / ACCESS_NAME, content.encode(), is_private=True)

    # ---- the client of the one request ----
    def _start_client(self, access: Access, request: PromptRequest) -> None:
        where = f"--endpoint={access.address}" if access.server_public is None else f"--key-file={self._place.path / ACCESS_NAME}"
        self._client = local.spawn_client(request, [where])
        self._place.reaper.watch(self._client.pid)

    def _look_at_client(self, gang: RayGang) -> None:
        """Stop the engine when its one client has ended."""
        if self._client is not None and self._client_outcome is None and (code := self._client.exit_code) is not None:
            self._client_outcome = client_outcome(self._client.pid, code)
            gang.begin_stop(drain=True)
            self._stop_deadline = Deadline.after(STOP_MARGIN_S)

    def _end_client(self) -> None:
        """It has had its error from the engine, and prints it, or is killed."""
        if self._client is not None:
            end = Deadline.after(STOP_MARGIN_S)
            while self._client.exit_code is None and not end.expired():
                time.sleep(_POLL_S)
            self._client.send(signal.SIGKILL)
            self._client.process.wait()
            self._client.close()

    # ---- being asked to stop ----
    def _answer_signals(self, gang: RayGang) -> Outcome | None:
        """Pass on what the user wants; an outcome when there is nothing more to wait for."""
        if self._signals.count > self._num_handled_signals:
            self._num_handled_signals = self._signals.count
            if not gang.is_ready or self._signals.count > 1:
                gang.begin_stop(drain=False, signum=self._signal())
                self._stop_deadline = Deadline.after(STOP_MARGIN_S)
                return self._interrupted() if not gang.is_ready else None
            limit_s = self._settings.shutdown_timeout
            self._stop_deadline = Deadline.after(limit_s + STOP_MARGIN_S)
            if self._client is None:
                gang.begin_stop(drain=True, signum=self._signal())
                if self._http is not None:
                    self._http.begin_stop()
            elif self._signal() is signal.SIGINT:
                self._client.send(signal.SIGINT)  # it cancels; SIGTERM lets its request finish
        if self._stop_deadline is not None and self._stop_deadline.expired():
            return self._client_outcome or self._interrupted()
        return None

    def _signal(self) -> signal.Signals:
        assert self._signals.last is not None
        return self._signals.last

    def _interrupted(self) -> Outcome:
        signum = self._signal()
        return Outcome(128 + signum, f"{INTERRUPTED}{signum.name.lower()}", signal=signum.name)
