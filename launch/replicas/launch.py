"""`kog-launch --replicas N`: keeps N engines alive and a router in front of them. docs/replicas.md says who does what.

Local replicas are child launchers; on a cluster Ray places them (`launch/replicas/ray_replica.py`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, KogError
from kog_dist.launch import detach
from kog_dist.launch.banner import show_banner
from kog_dist.launch.choice import choose_launcher
from kog_dist.launch.events import EventLog
from kog_dist.launch.http import EngineOfGateway, HttpGateway
from kog_dist.launch.outcome import (
    EXIT_CANNOT_START,
    EXIT_OK,
    EXIT_RANK_DIED,
    EXIT_TIMEOUT,
    INTERRUPTED,
    Outcome,
)
from kog_dist.launch.preflight import preflight
from kog_dist.launch.progress import StartupProgress
from kog_dist.launch.replicas.fleet_folder import FleetFolder
from kog_dist.launch.replicas.places import LocalReplica, Replica, StartReplica
from kog_dist.launch.replicas.remote_replica import RemoteReplicas
from kog_dist.launch.replicas.replica_set import ReplicaSet
from kog_dist.launch.replicas.router_process import RouterProcess
from kog_dist.launch.replicas.scaling import Scaler
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.target import model_folder
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.wait import Deadline

TICK_S = 0.05
STARTUP_MARGIN_S = 2.0  # a replica knows best why it is not ready, and says so after its own limit
DRAIN_MARGIN_S = 1.0  # the router ends requests that take too long; this is for a router that does not
STOP_S = 5.0  # for all replicas to stop, once nothing runs on them


def supervise(settings: LaunchConfig, request: PromptRequest | None) -> int:
    """Run the fleet until it is told to stop. Returns the exit code.

    Raises KogError only for what is wrong before any process exists.
    """
    with StopSignals() as signals, EventLog.of_run(settings, serves=True) as events, contextlib.ExitStack() as stack:
        try:
            if request is not None:
                raise ConfigError("--prompt goes with one engine; start the replicas without it and use kog-client generate")
            preflight(settings, serves=True)
            settings = with_device(settings)
            http = HttpGateway.open(settings)
            if http is not None:
                stack.callback(http.close)
            remotes = RemoteReplicas(settings.remote_replicas)
            socket_file = None if http is None else http.socket_file
            name = settings.instance or "default"
            launcher = LauncherFile.of_this_process(name, settings.shutdown_timeout, events.log_dir)
            with FleetFolder(name, socket_file) as folder, _starter(settings, folder, launcher, events) as start:
                detach.check_logs(events)
                launcher.write(folder.path)
                outcome = FleetLauncher(settings, folder, start, remotes, signals, events, http).run()
        except KogError as error:
            events.note(str(error))
            Outcome(error.exit_code, "cannot_start", str(error)).write(events.log_dir, settings.instance)
            raise
        if outcome.sentence is not None:
            events.say_end(outcome.sentence)
        events.note(f"exit code {outcome.exit_code}: {outcome.reason}")
        outcome.write(events.log_dir, settings.instance)
    return outcome.exit_code


def with_device(settings: LaunchConfig) -> LaunchConfig:
    """Replicas use GPUs only if the run says which, or how many: left to itself, the first one would take all."""
    return replace(settings, device="cpu") if settings.device == "auto" and settings.gpus is None else settings


@contextlib.contextmanager
def _starter(settings: LaunchConfig, folder: FleetFolder, launcher: LauncherFile, events: EventLog) -> Iterator[StartReplica]:
    """What starts a replica where this run wants them."""
    if settings.replicas and choose_launcher(settings, os.environ).launcher == "ray":
        from kog_dist.launch.replicas.ray_replica import ray_replicas

        with ray_replicas(settings, launcher, folder.path, events.note) as start:
            yield start
        return

    def start_local(name: str, _generation: int) -> Replica:
        return LocalReplica(settings, folder.name, name, watch=folder.watch, log_dir=events.log_dir)

    yield start_local


class FleetLauncher:
    """One fleet: its router, its replicas, and what their user wants."""

    def __init__(
        self,
        settings: LaunchConfig,
        folder: FleetFolder,
        start: StartReplica,
        remotes: RemoteReplicas,
        signals: StopSignals,
        events: EventLog,
        http: HttpGateway | None = None,
    ) -> None:
        self._settings, self._folder, self._http = settings, folder, http
        self._signals, self._events, self._remotes = signals, events, remotes
        self._replicas = ReplicaSet(start, events.say, time.monotonic)
        self._low = settings.min_replicas if settings.min_replicas is not None else settings.replicas
        self._high = settings.max_replicas if settings.max_replicas is not None else settings.replicas
        self._num_first = min(max(settings.replicas, self._low), self._high)
        self._begin_s = time.monotonic()
        self._scaler = Scaler(self._low, self._high, settings.scale_down_after, self._begin_s)
        self._router = RouterProcess(settings, folder, events)
        self._is_announced = False
        self._num_rolls = 0
        self._drain_deadline: Deadline | None = None
        self._progress = StartupProgress()

    def run(self) -> Outcome:
        """Start everything, keep it alive, and take it down again. Returns how it ended."""
        previous = signal.signal(signal.SIGUSR1, self._ask_for_roll)
        outcome: Outcome | None = None
        try:
            self._router.start()
            if self._http is not None:
                self._http.start(self._seen_by_gateway(), self._events.log_dir)
            self._replicas.grow(self._num_first)
            while outcome is None:
                self._wait()
                self._look()
                outcome = self._decide()
            return outcome
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
            return outcome
        finally:
            self._progress.clear()
            self._stop(outcome)
            signal.signal(signal.SIGUSR1, previous)

    def _seen_by_gateway(self) -> EngineOfGateway:
        """With replicas that others started, and none of ours, nobody here has the model's folder."""
        model, name = model_folder(self._settings) if self._high else (None, "")
        return EngineOfGateway(model, name, self._folder.path)

    def _ask_for_roll(self, _signum: int, _frame: FrameType | None) -> None:
        self._num_rolls += 1

    def _gateway_ended(self) -> Outcome | None:
        return None if self._http is None else self._http.look(self._events.say, has_served=self._is_announced)

    # ---- the loop ----
    def _wait(self) -> None:
        """Until something happens, at most a tick."""
        with selectors.DefaultSelector() as selector:
            fds = {self._signals.wakeup_fd, *(self._http.wake_fds() if self._http is not None else ())} | self._router.wake_fds()
            for slot in self._replicas.slots.values():
                fds |= set(slot.replica.wake_fds() if slot.replica is not None else [])
            for fd in fds:
                selector.register(fd, selectors.EVENT_READ)
            selector.select(TICK_S)

    def _look(self) -> None:
        self._signals.clear_wakeup()
        self._router.read_output()
        self._talk()
        self._replicas.look(self._router.report)
        self._remotes.look(self._router.report, time.monotonic())
        if (gone := self._folder.mend()) is not None:
            self._events.say(f"the process that cleans up (pid {gone}) was killed and has been started again", error=True)
        if self._num_rolls and self._drain_deadline is None:
            self._num_rolls = 0
            if self._replicas.begin_roll():
                self._events.say("SIGUSR1: restarting the replicas one by one")
        self._announce()
        self._scale()
        self._talk()

    def _talk(self) -> None:
        self._router.talk((*self._replicas.orders(), *self._remotes.orders()), is_draining=self._drain_deadline is not None)

    def _scale(self) -> None:
        report = self._router.report
        if report is None or self._high == self._low or self._drain_deadline is not None or not self._is_announced:
            return
        change = self._scaler.decide(
            time.monotonic(),
            num_replicas=len(self._replicas.slots),
            num_waiting=report.num_waiting,
            num_running=sum(replica.num_running for replica in report.replicas),
            is_settled=self._replicas.is_settled,
        )
        if change > 0:
            self._events.say(f"{report.num_waiting} requests wait: starting one replica more")
            self._replicas.grow()
        elif change < 0:
            self._events.say(f"one replica is not needed since {self._settings.scale_down_after:g} s: stopping it")
            self._replicas.shrink()

    def _announce(self) -> None:
        report = self._router.report
        if self._is_announced or report is None:
            return
        ready = [replica for replica in report.replicas if replica.state == "ready"]
        answers = self._http is None or self._http.is_ready()
        if not ready or not answers or self._replicas.num_serving < self._num_first:
            self._progress.show(f"waiting for {self._still()}")
            return
        self._progress.clear()
        self._is_announced = self._replicas.is_announced = True
        ranks = ready[0].world_size
        what = f"{len(ready)} replica{'s' if len(ready) > 1 else ''} of {ranks} rank{'s' if ranks > 1 else ''}"
        self._events.say(
            f"{ready[0].model} on {what}, instance {self._folder.name}, {report.address}, "
            f"{f'{self._http.url}, ' if self._http is not None else ''}ready after {time.monotonic() - self._begin_s:.1f} s"
        )
        url = None if self._http is None else self._http.url
        show_banner(self._settings, url, {"model": f"{ready[0].model}, {what}"}, self._events)
        detach.ready()

    # ---- decisions ----
    def _decide(self) -> Outcome | None:
        if self._drain_deadline is None and (sentence := self._folder.loss()) is not None:
            return Outcome(EXIT_RANK_DIED if self._is_announced else EXIT_CANNOT_START, "instance_lost", sentence)
        if self._replicas.failure is not None:
            return self._replicas.failure
        outcome = self._router.ended(has_served=self._is_announced) or self._gateway_ended() or self._answer_signals()
        if outcome is not None:
            return outcome
        if self._replicas.is_lost() and not len(self._remotes):
            return Outcome(EXIT_RANK_DIED, "no_replica_left", "no replica is left; see what ended them above")
        limit_s = self._settings.startup_timeout + STARTUP_MARGIN_S
        if not self._is_announced and time.monotonic() - self._begin_s > limit_s:
            sentence = f"the replicas were not ready after {self._settings.startup_timeout:g} s: {self._still()}"
            return Outcome(EXIT_TIMEOUT, "startup_timeout", sentence)
        return None

    def _still(self) -> str:
        """What start-up waits for: `replica r1: loading`."""
        report = self._router.report
        reported = {replica.name: replica for replica in report.replicas} if report is not None else {}
        doing = {name: slot.replica.doing for name, slot in self._replicas.slots.items() if slot.replica is not None}
        doing |= {name: f"{replica.state} {replica.reason}".strip() for name, replica in reported.items()}
        late = [f"replica {name}: {what}" for name, what in doing.items() if what != "ready"]
        return f"{late[0]}, and {len(late) - 1} more" if len(late) > 1 else "".join(late) or "the router"

    def _answer_signals(self) -> Outcome | None:
        signals = self._signals
        if self._drain_deadline is not None:
            if signals.count > 1:
                return self._interrupted()
            if self._drain_deadline.expired():
                return Outcome(EXIT_TIMEOUT, "drain_timeout", "the router did not end in time and was killed")
            return None
        if signals.count > 1 or (signals.count and not self._is_announced):
            return self._interrupted()
        if signals.count or ((report := self._router.report) is not None and report.is_draining):
            limit_s = self._settings.shutdown_timeout
            self._drain_deadline = Deadline.after(limit_s + DRAIN_MARGIN_S)
            if self._http is not None:
                self._http.begin_stop()
            who = signals.last.name if signals.last is not None else "a client asked"
            self._events.say(f"{who}: draining, at most {limit_s:g} s")
        return None

    def _interrupted(self) -> Outcome:
        signum = self._signals.last
        assert signum is not None
        return Outcome(128 + signum, f"{INTERRUPTED}{signum.name.lower()}", signal=signum.name)

    def _stop(self, outcome: Outcome | None) -> None:
        """End every process; replicas whose requests are finished, or given up, do not take long."""
        if self._http is not None:
            self._http.begin_stop()
        self._router.begin_stop()
        is_orderly = outcome is not None and outcome.exit_code == EXIT_OK
        self._replicas.begin_stop(drain=is_orderly)
        deadline = Deadline.after(STOP_S)
        while not self._replicas.ended() and not deadline.expired():
            self._wait()
            self._gateway_ended()  # one that is stopped is killed in time, so that its clients know
        self._replicas.close()
        self._router.close()
