"""Whether the engine can be used, and if not, why: one state, made from what the engine says and from its silence.

The engine is asked ten times a second. A process that dies is seen at once, since its connection closes.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Final

from kog_dist.records import dataclass
from kog_dist.rpc.messages import EngineState, StatusReport

ASK_EVERY_S: Final = 0.1
ASK_FIRST_S: Final = 0.02  # until the engine is ready for the first time
SILENT_S: Final = 0.5  # an engine that answers nothing for so long
STUCK_S: Final = 10.0  # a running request that does not get on for so long
RETRY_AFTER_S: Final = {"loading": 1.0, "draining": 5.0, "failed": 2.0}


class State(enum.StrEnum):
    """What a client may expect."""

    LOADING = "loading"  # the first time; nothing has been served yet
    READY = "ready"
    DEGRADED = "degraded"  # requests are served, and something is wrong: a replica of several is missing
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Health:
    """The answer of /readyz."""

    state: State
    reason: str

    @property
    def serves(self) -> bool:
        """Whether requests are taken."""
        return self.state in (State.READY, State.DEGRADED)


class Readiness:
    """Takes in what happens; `health` is the judgement at this moment."""

    def __init__(self, *, stall_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`stall_s`: the launcher's limit for a rank without a heartbeat. Half of it, at least 0.5 s, counts as failed here."""
        self.report: StatusReport | None = None
        self.is_draining = False  # this process was told to stop
        self._silent_rank_s = max(SILENT_S, stall_s / 2)
        self._clock = clock
        self._reported_s = 0.0
        self._has_served = False
        self._lost: str | None = "the engine has not been reached yet"
        self._mismatch: str | None = None
        self._asked_s: float | None = None
        self._progress: tuple[str | None, int, int, int] = (None, 0, 0, 0)
        self._progressed_s = clock()

    # ---- what happens ----
    def asked(self) -> None:
        """A status was asked for; what is judged is the time from here to the answer."""
        if self._asked_s is None:
            self._asked_s = self._clock()

    def reported(self, report: StatusReport) -> None:
        """The engine has answered."""
        now_s = self._clock()
        self.report, self._reported_s, self._lost, self._asked_s = report, now_s, None, None
        progress = (report.running, report.running_position, report.used_positions, report.num_tokens)
        if progress != self._progress or report.running is None:
            self._progress, self._progressed_s = progress, now_s
        self._has_served = self._has_served or report.state is EngineState.READY

    def lost(self, reason: str) -> None:
        """The engine is gone, or was not found."""
        self._lost, self._asked_s = reason, None

    def mismatch(self, reason: str | None) -> None:
        """The engine is there and is not the one that this gateway can speak for."""
        self._mismatch = reason

    def forgive(self) -> None:
        """This process itself was held up: what it did not hear meanwhile proves nothing."""
        now_s = self._clock()
        self._progressed_s = now_s
        if self._asked_s is not None:
            self._asked_s = now_s

    @property
    def has_served(self) -> bool:
        """Whether the engine has ever been ready."""
        return self._has_served

    @property
    def is_connected(self) -> bool:
        """Whether an engine is there, in whatever state."""
        return self._lost is None

    # ---- the judgement ----
    def health(self) -> Health:
        """State and reason, in one sentence."""
        if self.is_draining and (self.report is None or self.report.state is not EngineState.FAILED):
            return Health(State.DRAINING, "this service is being stopped and takes no new requests")
        if self._mismatch is not None:
            return Health(State.FAILED, self._mismatch)
        if self._lost is not None or self.report is None:
            state = State.FAILED if self._has_served else State.LOADING
            return Health(state, self._lost or "the engine has not said anything yet")
        if self._asked_s is not None and (silent_s := self._clock() - self._asked_s) > SILENT_S:
            return Health(State.FAILED, f"the engine has not answered for {silent_s:.1f} s; it hangs or was stopped")
        return self._of_report(self.report)

    def _of_report(self, report: StatusReport) -> Health:
        if report.state is EngineState.FAILED:
            return Health(State.FAILED, "a rank was lost; the engine is being stopped")
        if report.state is EngineState.DRAINING:
            return Health(State.DRAINING, "the engine is being stopped and takes no new requests")
        if report.replica_names:
            return self._of_replicas(report)
        if report.state is EngineState.LOADING:
            behind = [rank for rank, state in enumerate(report.rank_states) if state not in ("ready", "running")]
            state = State.FAILED if self._has_served else State.LOADING
            what = f"rank {behind[0]} is {report.rank_states[behind[0]]}" if behind else "the engine is starting"
            return Health(state, what + (f", {len(behind) - 1} more not ready" if len(behind) > 1 else ""))
        oldest_s, rank = max(((age_s, rank) for rank, age_s in enumerate(report.beat_ages_s)), default=(0.0, 0))
        if oldest_s > self._silent_rank_s:
            return Health(State.FAILED, f"rank {rank} has given no sign of life for {oldest_s:.1f} s")
        if report.running is not None and (stuck_s := self._clock() - self._progressed_s) > STUCK_S:
            return Health(State.FAILED, f"the running request has not got on for {stuck_s:.0f} s, though all ranks are alive")
        return Health(State.READY, "all ranks answer")

    def _of_replicas(self, report: StatusReport) -> Health:
        pairs = list(zip(report.replica_names, report.replica_states, strict=False))
        out = [f"{name} {state}" for name, state in pairs if not state.startswith(("ready", "retiring"))]
        if report.state is EngineState.READY:
            if out:
                return Health(State.DEGRADED, f"{len(out)} of {len(pairs)} replicas do not serve: {'; '.join(out)}"[:500])
            return Health(State.READY, "all replicas answer")
        state = State.FAILED if self._has_served else State.LOADING
        return Health(state, f"no replica serves: {'; '.join(out)}"[:500] if out else "no replica serves yet")
