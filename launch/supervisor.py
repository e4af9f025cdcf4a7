"""The `kog-launch` process: starts the engine, watches it, alone decides that it must stop, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import time
from pathlib import Path

from kog_dist.config import LaunchConfig
from kog_dist.control import COORDINATOR, AbortCause, RankState
from kog_dist.errors import KogError, LaunchError
from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.local import Child
from kog_dist.launch.outcome import (
    EXIT_CANNOT_START,
    EXIT_OK,
    EXIT_RANK_DIED,
    EXIT_TIMEOUT,
    INTERRUPTED,
    Outcome,
    how_it_ended,
    signal_name,
)
from kog_dist.launch.request import PromptRequest
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.target import choose_target
from kog_dist.wait import Deadline

TICK_S = 0.05  # deaths and signals end a tick at once; heartbeats and requests to abort are looked at every tick
DRAIN_MARGIN_S = 1.0  # the coordinator ends a request that takes too long; this is for a coordinator that does not
COORDINATOR_STALL_FACTOR = 5  # the coordinator may be busy with one large message; ranks never are

_DOING = {
    RankState.STARTING: "starting its interpreter",
    RankState.LOADING: "loading weights",
    RankState.LINKING: "waiting for the other ranks",
    RankState.READY: "ready",
    RankState.RUNNING: "running",
    RankState.STOPPED: "stopped",
    RankState.FAILED: "failed",
}


def supervise(settings: LaunchConfig, request: PromptRequest | None) -> int:
    """Run an engine until it is told to stop, or until `request` is answered. Returns the exit code.

    Raises KogError only for what is wrong before any process exists.
    """
    with StopSignals() as signals:
        log_dir = _log_folder(settings)
        try:
            engine = EngineProcesses(settings, choose_target(settings), request, log_dir)
        except KogError as error:
            Outcome(error.exit_code, "cannot_start", str(error)).write(log_dir, settings.instance)
            raise
        outcome: Outcome | None = None
        try:
            outcome = Supervisor(settings, engine, signals).run()
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
            _say(outcome)
        finally:
            engine.stop(outcome)
            if outcome is not None:
                outcome.write(log_dir, engine.instance)
    return outcome.exit_code


class Supervisor:
    """Watches one engine. Every decision to stop is an `Outcome`; the first one stands."""

    def __init__(self, settings: LaunchConfig, engine: EngineProcesses, signals: StopSignals) -> None:
        self._settings = settings
        self._engine = engine
        self._signals = signals
        self._is_ready = False
        self._drain_deadline: Deadline | None = None
        self._last_tick_s = time.monotonic()
        self._begin_s = time.monotonic()

    def run(self) -> Outcome:
        """Start, watch, and return how it ended; the processes may still run then."""
        engine = self._engine
        with selectors.DefaultSelector() as selector:
            selector.register(self._signals.wakeup_fd, selectors.EVENT_READ)
            if self._signals.count:  # Ctrl-C while the checkpoint was opened
                return self._interrupted()
            engine.start()
            for child in engine.children:
                selector.register(child.pidfd, selectors.EVENT_READ, child)
                selector.register(child.stderr_fd, selectors.EVENT_READ, child)
            deadline = Deadline.after(self._settings.startup_timeout)
            while True:
                for key, _ in selector.select(TICK_S):
                    self._take(selector, key)
                outcome = self._decide(deadline)
                if outcome is not None:
                    _say(outcome)
                    return outcome

    def _take(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        child = key.data
        if child is None:
            self._signals.clear_wakeup()
        elif key.fd == child.pidfd or not child.read_output():
            selector.unregister(key.fd)

    def _decide(self, startup_deadline: Deadline) -> Outcome | None:
        """Look at everything that can end the run, causes before consequences."""
        if not self._is_ready and self._engine.is_ready():
            self._is_ready = True
            self._announce()
        outcome = self._abort_requested() or self._death() or self._interrupted_or_draining()
        if outcome is None and not self._is_ready:
            outcome = self._startup(startup_deadline)
        elif outcome is None:
            outcome = self._stalled()
        self._last_tick_s = time.monotonic()
        return outcome

    # ---- deaths ----
    def _death(self) -> Outcome | None:
        dead = [child for child in self._engine.children if child.exit_code is not None]
        for child in dead:
            child.read_output()
        for child in sorted(dead, key=_blame):
            if child.role == "client":
                return self._client_ended(child)
            if child.role == "coordinator" and child.exit_code == 0:
                if self._engine.request is not None:
                    continue  # somebody drained it; the client has its answer, or says what it was told
                return Outcome(EXIT_OK, "drained")
            return self._process_died(child)
        return None

    def _client_ended(self, child: Child) -> Outcome:
        code = child.exit_code
        assert code is not None
        if code >= 0:
            return Outcome(code, "answered" if code == 0 else "request_failed")
        sentence = f"the client (pid {child.pid}) {how_it_ended(code)} before the answer was complete"
        return Outcome(128 - code, "client_killed", sentence, pid=child.pid, signal=signal_name(code))

    def _process_died(self, child: Child) -> Outcome:
        code = child.exit_code
        assert code is not None
        rank = self._engine.rank_of(child)
        last = child.last_line().removeprefix(f"{child.role}: ")
        if not self._is_ready:
            return self._startup_death(child, code, last)
        cause = AbortCause.COORDINATOR_DIED if rank is None else AbortCause.RANK_DIED
        self._engine.abort(cause, COORDINATOR if rank is None else rank)
        why = f": {last}" if last and code >= 0 else ""
        sentence = f"{child.role} (pid {child.pid}) {how_it_ended(code)} while serving{why}; the engine was stopped"
        return Outcome(EXIT_RANK_DIED, cause.name.lower(), sentence, rank, child.pid, signal_name(code))

    def _startup_death(self, child: Child, code: int, last: str) -> Outcome:
        rank = self._engine.rank_of(child)
        self._engine.abort(AbortCause.STARTUP_FAILED, COORDINATOR if rank is None else rank)
        if code >= 0 and last:
            sentence = f"{child.role} could not start: {last}"
        else:
            sentence = f"{child.role} (pid {child.pid}) {how_it_ended(code)} during start-up"
        others = self._engine.world_size - (rank is not None)
        if others:
            sentence += f" ({others} rank{'s' if others > 1 else ''} stopped because of {child.role})"
        return Outcome(EXIT_CANNOT_START, "startup_failed", sentence, rank, child.pid, signal_name(code))

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
        limit_s, now_s = self._settings.stall_timeout, time.monotonic()
        if now_s - self._last_tick_s > 4 * TICK_S:
            return None  # this process itself was held up, so the ranks may have been; ages count from the next tick
        control = self._engine.control
        for rank in range(self._engine.world_size):
            if control.state(rank) in (RankState.READY, RankState.RUNNING) and (age_s := control.beat_age_s(rank)) > limit_s:
                self._engine.abort(AbortCause.RANK_STALLED, rank)
                pid = self._engine.rank_pid(rank)
                sentence = f"rank {rank} (pid {pid}) gave no sign of life for {age_s:.2f} s; the engine was stopped"
                return Outcome(EXIT_TIMEOUT, "rank_stalled", sentence, rank, pid)
        if (age_s := control.beat_age_s(COORDINATOR)) > COORDINATOR_STALL_FACTOR * limit_s:
            self._engine.abort(AbortCause.COORDINATOR_DIED, COORDINATOR)
            sentence = f"the coordinator gave no sign of life for {age_s:.2f} s; the engine was stopped"
            return Outcome(EXIT_TIMEOUT, "coordinator_stalled", sentence)
        return None

    # ---- start-up ----
    def _startup(self, deadline: Deadline) -> Outcome | None:
        engine = self._engine
        if not deadline.expired():
            return None
        waiting = [rank for rank in range(engine.world_size) if engine.control.state(rank) is not RankState.READY]
        engine.abort(AbortCause.STARTUP_FAILED, waiting[0] if waiting else COORDINATOR)
        if waiting:
            doing = _DOING[engine.control.state(waiting[0])]
            names = f"rank {waiting[0]} is still {doing}" + (f", {len(waiting) - 1} more not ready" if len(waiting) > 1 else "")
        else:
            names = "the coordinator is not serving yet"
        sentence = f"the engine was not ready after {self._settings.startup_timeout:g} s: {names}; see --startup-timeout"
        return Outcome(EXIT_TIMEOUT, "startup_timeout", sentence, waiting[0] if waiting else None)

    def _announce(self) -> None:
        engine = self._engine
        if engine.request is not None:
            return
        ranks = f"{engine.world_size} rank{'s' if engine.world_size > 1 else ''}"
        took_s = time.monotonic() - self._begin_s
        _event(
            f"kog-launch: {engine.model_name} on {ranks} ({engine.device}), instance {engine.instance}, "
            f"{engine.endpoint}, ready after {took_s:.1f} s"
        )

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
            sentence = f"the running request did not finish within {self._settings.shutdown_timeout:g} s and was ended"
            return Outcome(EXIT_TIMEOUT, "drain_timeout", sentence)
        if signals.count == 0:
            return None
        if not self._is_ready or signals.count > 1:
            return self._interrupted()
        assert signals.last is not None
        self._drain_deadline = Deadline.after(self._settings.shutdown_timeout + DRAIN_MARGIN_S)
        if engine.request is None:
            _event(f"kog-launch: {signals.last.name}: draining, at most {self._settings.shutdown_timeout:g} s")
            engine.control.set_drain()
        elif signals.last is signal.SIGINT:  # the client cancels; SIGTERM lets its request finish
            self._drain_deadline = Deadline.after(DRAIN_MARGIN_S)
            engine.signal_client(signal.SIGINT)
        return None

    def _interrupted(self) -> Outcome:
        signum = self._signals.last
        assert signum is not None
        return Outcome(128 + signum, f"{INTERRUPTED}{signum.name.lower()}", signal=signum.name)


def _blame(child: Child) -> tuple[bool, bool]:
    """Sorts deaths seen together: what was killed before what stopped by itself (perhaps for missing a peer), the client last."""
    return child.role == "client", (child.exit_code or 0) >= 0


def _log_folder(settings: LaunchConfig) -> Path | None:
    if settings.log_dir is None:
        return None
    folder = Path(settings.log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"log folder {folder} cannot be made: {error.strerror}") from None
    return folder


def _say(outcome: Outcome) -> None:
    if outcome.sentence is not None:
        _event(f"kog-launch: {outcome.sentence}", error=True)


def _event(line: str, *, error: bool = False) -> None:
    """One line for the user; a reader that went away does not stop the engine."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(line, file=stream, flush=True)
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):  # or what is still in the buffer fails again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())
