"""The `kog-launch` process: starts the engine, watches it, alone decides that it must stop, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import math
import select
import selectors
import signal
import time
from dataclasses import replace

from kog_dist.config import LaunchConfig
from kog_dist.errors import KogError
from kog_dist.launch import detach
from kog_dist.launch.banner import facts_of, show_banner
from kog_dist.launch.deaths import Deaths
from kog_dist.launch.engine import EngineProcesses, RankSource
from kog_dist.launch.events import EventLog
from kog_dist.launch.http import HttpGateway
from kog_dist.launch.liveness import LOOP_STALL_FACTOR, Vigil
from kog_dist.launch.outcome import (
    EXIT_CANNOT_START,
    EXIT_RANK_DIED,
    EXIT_TIMEOUT,
    INTERRUPTED,
    Outcome,
)
from kog_dist.launch.preflight import preflight
from kog_dist.launch.process import EngineProcess
from kog_dist.launch.progress import AwaitedStage, StartupProgress, starts_of, waiting_for
from kog_dist.launch.restarts import RestartBudget
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.target import choose_target
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.runtime.control import COORDINATOR, AbortCause, RankState
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.wait import Deadline

TICK_S = 0.05  # deaths and signals end a tick at once; heartbeats and requests to abort are looked at every tick
DRAIN_MARGIN_S = 1.0  # the coordinator ends a request that takes too long; this is for a coordinator that does not
EXITING_S = 2.0  # for the system to say how a rank ended that is ending; it gives GPU memory back first
FAILED_STALL_FACTOR = 3  # a rank that has failed does not beat while it gives back what it has
RETRY_S = 2.0  # between a start that failed and the next one
_LOSSES = frozenset(  # after which a service starts its engine again
    {"rank_died", "rank_stalled", "requested_by_rank", "coordinator_died", "coordinator_stalled", "instance_lost"}
)
_FAILED_STARTS = frozenset({"startup_failed", "startup_timeout", "cannot_start"})  # of an engine that has served before


def supervise(settings: LaunchConfig, request: PromptRequest | None, ranks: RankSource | None = None) -> int:
    """Run an engine until it is told to stop, or until `request` is answered. Returns the exit code.

    Its ranks come from `ranks`; None: they are children of this process. Then one that serves HTTP is started again when it is
    lost, a few times. Raises KogError only for what is wrong before any process exists.
    """
    with StopSignals() as signals, EventLog.of_run(settings, serves=request is None) as events, contextlib.ExitStack() as stack:
        try:
            preflight(settings, serves=request is None)
            http = HttpGateway.open(settings) if request is None else None
            if http is not None:
                stack.callback(http.close)
            engine = _engine(settings, request, events, ranks, http)
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
            _record(outcome, events, settings.instance)
            events.note(str(error))
            raise
        restarts = RestartBudget() if http is not None and ranks is None else None
        generation = 1
        while True:
            outcome, goes_on = _run(settings, engine, signals, events, http, restarts, generation)
            while goes_on and http is not None:
                http.end_process()
                generation += 1
                if outcome.reason in _FAILED_STARTS:  # what keeps it from starting may pass
                    select.select([signals.wakeup_fd], [], [], RETRY_S)
                try:
                    engine = _engine(settings, request, events, ranks, http)
                    break
                except KogError as error:
                    outcome = Outcome(error.exit_code, "cannot_start", str(error))
                    outcome, goes_on = tell_end(outcome, events, restarts, generation, may_go_on=not signals.count)
            if not goes_on:
                break
    return outcome.exit_code


def _engine(
    settings: LaunchConfig, request: PromptRequest | None, events: EventLog, ranks: RankSource | None, http: HttpGateway | None
) -> EngineProcesses:
    socket_file = None if http is None else http.socket_file
    return EngineProcesses(settings, choose_target(settings), request, events.log_dir, ranks, socket_file)


def _run(
    settings: LaunchConfig,
    engine: EngineProcesses,
    signals: StopSignals,
    events: EventLog,
    http: HttpGateway | None,
    restarts: RestartBudget | None,
    generation: int,
) -> tuple[Outcome, bool]:
    """One generation, from its start until nothing of it is left: how it ended, and whether another one follows."""
    ended: Outcome | None = None
    goes_on = False
    supervisor = Supervisor(settings, engine, signals, events, http, generation)
    try:
        detach.check_logs(events)
        engine.introduce(LauncherFile.of_this_process(engine.instance, settings.shutdown_timeout, events.log_dir))
        ended = supervisor.run()
    except KogError as error:
        ended = Outcome(error.exit_code, "cannot_start", str(error))
    finally:
        if ended is not None:
            may_go_on = (supervisor.is_ready or generation > 1) and not signals.count and not engine.control.draining()
            ended, goes_on = tell_end(ended, events, restarts, generation, may_go_on=may_go_on)
            if not goes_on:  # at once: where a host of a rank died, mpirun kills this process, too
                _record(ended, events, engine.instance)
        if http is not None:
            http.begin_stop()  # it has been told how its requests end; while it finishes, so do the others
        engine.stop(ended, keeps_socket_file=goes_on)
    return ended, goes_on


def tell_end(
    outcome: Outcome, events: EventLog, restarts: RestartBudget | None, generation: int, *, may_go_on: bool
) -> tuple[Outcome, bool]:
    """Tell how a generation ended. Returns that, and whether another one is started."""
    is_loss = outcome.reason in _LOSSES or (generation > 1 and outcome.reason in _FAILED_STARTS)
    if restarts is not None and may_go_on and is_loss:
        if restarts.take():
            events.say(f"{outcome.sentence}; starting it again as generation {generation + 1}", error=True)
            return outcome, True
        given_up = f"{outcome.sentence}; it is not started again after {restarts}"
        outcome = replace(outcome, exit_code=EXIT_RANK_DIED, sentence=given_up)
    if outcome.sentence is not None and outcome.user_knows:
        events.note(outcome.sentence)
    elif outcome.sentence is not None:
        events.say_end(outcome.sentence)
    return outcome, False


def _record(outcome: Outcome, events: EventLog, instance: str | None) -> None:
    events.note(f"exit code {outcome.exit_code}: {outcome.reason}")
    outcome.write(events.log_dir, instance)


class Supervisor:
    """Watches one engine. Every decision to stop is an `Outcome`; the first one stands."""

    def __init__(
        self,
        settings: LaunchConfig,
        engine: EngineProcesses,
        signals: StopSignals,
        events: EventLog,
        http: HttpGateway | None = None,
        generation: int = 1,
    ) -> None:
        self._generation = generation
        self._settings = settings
        self._events = events
        self._engine = engine
        self._http = http
        self._signals = signals
        self._deaths = Deaths(engine, settings.shutdown_timeout, lambda: self.is_ready)
        self.is_ready = False  # or was, before it ended
        self._drain_deadline: Deadline | None = None
        self._lost_lifeline: str | None = None
        self._exiting: tuple[EngineProcess, Deadline] | None = None  # the rank that is ending while the engine serves
        self._progress = StartupProgress(under_starter=bool(engine.ranks.origin))
        self._vigils: list[Vigil] = []
        self._begin_s = time.monotonic()

    def run(self) -> Outcome:
        """Start, watch, and return how it ended; the processes may still run then."""
        engine = self._engine
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wakeup_fd, selectors.EVENT_READ)
            for lifeline_fd, who in engine.ranks.lifelines.items():
                selector.register(lifeline_fd, selectors.EVENT_READ, who)
            if self._signals.count:  # Ctrl-C while the checkpoint was opened
                return self._interrupted()
            if engine.note:
                self._events.note(engine.note)
            engine.start()
            if self._http is not None:
                self._http.start(engine.seen_by_gateway, self._events.log_dir)
            self._vigils = [Vigil(child, self._settings.stall_timeout) for child in engine.children if child.role != "client"]
            for child in engine.children:
                selector.register(child.ended_fd, selectors.EVENT_READ, child)
                selector.register(child.stderr_fd, selectors.EVENT_READ, child)
            deadline = Deadline.after(self._settings.startup_timeout)
            while True:
                for key, _ in selector.select(TICK_S):
                    self._take(selector, key)
                outcome = self._decide(deadline)
                if outcome is not None:
                    self._progress.clear()
                    return outcome

    def _take(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        child = key.data
        if child is None:
            self._signals.clear_wakeup()
        elif isinstance(child, str):
            selector.unregister(key.fd)
            self._lost_lifeline = child
        elif key.fd == child.ended_fd or not child.read_output():
            selector.unregister(key.fd)

    def _decide(self, startup_deadline: Deadline) -> Outcome | None:
        """Look at everything that can end the run, causes before consequences: who was killed is never a consequence."""
        for child in self._engine.children:
            child.oom_kills.look()
        if (gone := self._engine.mend_reaper()) is not None:
            self._events.say(f"the process that cleans up (pid {gone}) was killed and has been started again", error=True)
        if not self.is_ready and self._engine.is_ready() and (self._http is None or self._http.is_ready()):
            self.is_ready = True
            self._progress.clear()
            self._announce()
        outcome = self._rank_ended()
        if outcome is None and self._exiting is None:
            outcome = self._orphaned() or self._deaths.by_signal() or self._abort_requested() or self._deaths.first()
        if outcome is None and (self._exiting is not None or self._has_exiting_rank()):
            return None
        outcome = outcome or self._instance_lost() or self._gateway_ended() or self._interrupted_or_draining()
        outcome = outcome or self._stalled()
        return outcome if outcome is not None or self.is_ready else self._startup(startup_deadline)

    # ---- deaths ----
    def _has_exiting_rank(self) -> bool:
        """Whether a rank is ending. Its peers and the clients are told at once, everybody else when it is known how it ended."""
        is_told = self._signals.count > 1 or (self._signals.count and self._engine.ranks.is_killed_soon)
        if not self.is_ready or is_told:  # ranks may end because of whoever stops the engine, in this very moment
            return False
        child = next((child for child in self._engine.children if child.rank is not None and child.is_exiting()), None)
        if child is None or child.rank is None:
            return False
        self._engine.abort(AbortCause.RANK_DIED, child.rank)
        self._exiting = child, Deadline.after(EXITING_S)
        return True

    def _rank_ended(self) -> Outcome | None:
        """The end of the rank that was ending. What the others do meanwhile follows from the abort, unless somebody kills one."""
        if self._exiting is None:
            return None
        child, deadline = self._exiting
        if child.exit_code is None:
            sentence = (
                f"{child.role} (pid {child.pid}) has been ending for {EXITING_S:g} s while serving, and how is not known yet "
                f"(its GPU memory is given back first; if that takes long, see the kernel log); the engine was stopped"
            )
            return Outcome(EXIT_RANK_DIED, "rank_died", sentence, child.rank, child.pid) if deadline.expired() else None
        child.read_output()
        if child.exit_code < 0:
            return self._orphaned() or self._deaths.of(child)
        return self._orphaned() or self._deaths.by_signal() or self._abort_requested() or self._deaths.of(child)

    def _gateway_ended(self) -> Outcome | None:
        """The engine is not harmed by the end of its gateway; one that cannot start, or ends again and again, stops the run."""
        if self._http is None:
            return None
        outcome = self._http.look(self._events.say, has_served=self.is_ready)
        if outcome is not None:
            self._engine.abort(AbortCause.SHUTDOWN if self.is_ready else AbortCause.STARTUP_FAILED)
        return outcome

    def _instance_lost(self) -> Outcome | None:
        """No client would find the engine any more; one that drains has all its clients."""
        if self._drain_deadline is not None:
            return None
        sentence = self._engine.loss_of_instance(was_ready=self.is_ready)
        if sentence is None:
            return None
        self._engine.abort(AbortCause.INSTANCE_LOST if self.is_ready else AbortCause.STARTUP_FAILED)
        return Outcome(EXIT_RANK_DIED if self.is_ready else EXIT_CANNOT_START, "instance_lost", sentence)

    def _orphaned(self) -> Outcome | None:
        if self._lost_lifeline is None:
            return None
        self._engine.abort(AbortCause.SHUTDOWN)
        return Outcome(
            EXIT_RANK_DIED, "starter_lost", f"{self._lost_lifeline} is gone, which had started the ranks; so they stopped"
        )

    # ---- ranks that live but do not go on ----
    def _abort_requested(self) -> Outcome | None:
        for rank, record in self._engine.control.abort_requests():
            self._engine.abort(AbortCause.REQUESTED_BY_RANK, rank)
            pid = self._engine.rank_pid(rank)
            seen = str(record) if record is not None else f"rank {rank} asked for an abort"
            code = EXIT_TIMEOUT if record is not None else EXIT_RANK_DIED
            return Outcome(code, "requested_by_rank", f"{seen}; the engine was stopped", rank, pid)
        return None

    def _stalled(self) -> Outcome | None:
        for vigil in self._vigils:
            child = vigil.process
            silence = vigil.look(*self._beat(child.rank)) if self.is_ready else vigil.look()
            if silence is None:
                continue
            rank = child.rank
            cause, reason = AbortCause.RANK_STALLED, "rank_stalled"
            if rank is None:
                cause, reason = AbortCause.COORDINATOR_DIED, "coordinator_stalled"
            if not self.is_ready:
                cause = AbortCause.STARTUP_FAILED
            self._engine.abort(cause, COORDINATOR if rank is None else rank)
            child.send(signal.SIGKILL)
            when = "" if self.is_ready else " during start-up"
            sentence = f"{child.role} (pid {child.pid}) {silence}{when}; the engine was stopped"
            return Outcome(EXIT_TIMEOUT, reason, sentence, rank, child.pid)
        return None

    def _beat(self, rank: int | None) -> tuple[float, float]:
        """Age of the heartbeat of a rank, or of the coordinator (None), and its limit. Ranks have no messages to be busy with."""
        limit_s, control = self._settings.stall_timeout, self._engine.control
        if rank is None:
            return control.beat_age_s(COORDINATOR), LOOP_STALL_FACTOR * limit_s
        limits_s = {RankState.READY: limit_s, RankState.RUNNING: limit_s, RankState.FAILED: FAILED_STALL_FACTOR * limit_s}
        return control.beat_age_s(rank), limits_s.get(control.state(rank), math.inf)

    # ---- start-up ----
    def _startup(self, deadline: Deadline) -> Outcome | None:
        engine = self._engine
        starts = starts_of(engine.control)
        if not deadline.expired():
            waiting = AwaitedStage("waiting for the HTTP gateway") if engine.is_ready() else waiting_for(starts)
            self._progress.show(waiting.text, doing=waiting.doing, share=waiting.share)
            return None
        unready = (rank for rank, start in enumerate(starts) if not start.is_ready)
        late = sorted(unready, key=lambda rank: starts[rank].state)  # first the furthest behind, on which others wait
        engine.abort(AbortCause.STARTUP_FAILED, late[0] if late else COORDINATOR)
        if late:
            names = f"rank {late[0]} is still {starts[late[0]].doing}" + (f", {len(late) - 1} more not ready" if late[1:] else "")
        elif engine.is_ready():
            names = "the HTTP gateway does not answer yet"
        else:
            names = "the coordinator is not serving yet"
        sentence = f"the engine was not ready after {self._settings.startup_timeout:g} s: {names}; see --startup-timeout"
        return Outcome(EXIT_TIMEOUT, "startup_timeout", sentence, late[0] if late else None)

    def _announce(self) -> None:
        engine = self._engine
        if summary := self._progress.summary():
            self._events.note(f"start-up: {summary}")
        for child in engine.children:
            child.read_output()
            for text in child.notes:
                self._events.note(f"{child.role}: {text}")
        if engine.request is not None:
            return
        ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
        origin = f", started by {engine.ranks.origin}" if engine.ranks.origin else ""
        took_s = time.monotonic() - self._begin_s
        if self._generation > 1:
            self._events.say(f"generation {self._generation} is ready after {took_s:.1f} s")
            return
        self._events.say(
            f"{engine.model_name} on {ranks} ({engine.kind}){origin}, instance {engine.instance}, "
            f"{engine.endpoint}{f', {self._http.url}' if self._http is not None else ''}, ready after {took_s:.1f} s"
        )
        show_banner(self._settings, None if self._http is None else self._http.url, facts_of(engine.target), self._events)
        detach.ready()

    # ---- being asked to stop ----
    def _interrupted_or_draining(self) -> Outcome | None:
        engine, signals = self._engine, self._signals
        if self._drain_deadline is not None:
            if signals.count > 1:
                return self._interrupted()
            if not self._drain_deadline.expired():
                return None
            if engine.request is not None and signals.last is signal.SIGINT:
                return self._interrupted()
            return self._deaths.cut_off()
        if signals.count == 0:
            return None
        if not self.is_ready or signals.count > 1 or engine.ranks.is_killed_soon:
            return self._interrupted()
        assert signals.last is not None
        self._drain_deadline = Deadline.after(self._settings.shutdown_timeout + DRAIN_MARGIN_S)
        if engine.request is None:
            self._events.say(f"{signals.last.name}: draining, at most {self._settings.shutdown_timeout:g} s")
            engine.control.set_drain()
            if self._http is not None:
                self._http.begin_stop()
        elif signals.last is signal.SIGINT:  # the client cancels; SIGTERM lets its request finish
            self._drain_deadline = Deadline.after(DRAIN_MARGIN_S)
            engine.signal_client(signal.SIGINT)
        return None

    def _interrupted(self) -> Outcome:
        signum = self._signals.last
        assert signum is not None
        return Outcome(128 + signum, f"{INTERRUPTED}{signum.name.lower()}", signal=signum.name)
