"""What the engine is able to do, as its coordinator sees it, and why the coordinator ends."""

from __future__ import annotations

import select

from kog_dist.rpc.client_events import Farewell
from kog_dist.rpc.messages import EngineState, ErrorCode
from kog_dist.runtime.control import AbortCause, ControlPage, RankState
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.coordinator.abort_text import describe_abort
from kog_dist.workers.coordinator.arguments import CoordinatorArgs
from kog_dist.workers.coordinator.watch import RankWatch


class EngineLife:
    """Looks at the control page, the launcher and the ranks; knows of a drain."""

    def __init__(self, args: CoordinatorArgs, control: ControlPage, supervisor_fd: int) -> None:
        """`supervisor_fd`: a pidfd that becomes readable when the supervisor is dead; -1 for none."""
        self._control, self._supervisor_fd, self._drain_s = control, supervisor_fd, args.drain_s
        self._watch = RankWatch(control, args.supervisor_pid)
        self._has_been_ready = False
        self._drain_deadline: Deadline | None = None

    @property
    def state(self) -> EngineState:
        """What the engine can do now."""
        if self._control.aborted() or (self._has_been_ready and self._watch.has_failed_rank()) or self.fault() is not None:
            return EngineState.FAILED
        if self.draining:
            return EngineState.DRAINING
        return EngineState.READY if self.is_ready() else EngineState.LOADING

    def is_ready(self) -> bool:
        """Whether all ranks have finished their start."""
        if not self._has_been_ready:
            ranks = range(self._control.world_size)
            self._has_been_ready = all(self._control.state(rank) in (RankState.READY, RankState.RUNNING) for rank in ranks)
        return self._has_been_ready

    def fault(self) -> str | None:
        """A sentence once a rank is lost and the launcher has had its time to act."""
        return self._watch.look()

    # ---- drain ----
    @property
    def draining(self) -> bool:
        """Whether nothing new is taken any more."""
        return self._drain_deadline is not None

    def drain(self) -> None:
        """Take nothing new from now on; what runs has `drain_s` left."""
        if self._drain_deadline is None:
            self._drain_deadline = Deadline.after(self._drain_s)

    # ---- the end ----
    def farewell(self, *, is_running: bool, is_idle: bool) -> Farewell | None:
        """Why the coordinator must end now. `is_idle`: nothing runs and clients have all that was for them."""
        if (abort := self._control.abort()) is not None:
            cause, rank = abort
            if cause is AbortCause.SHUTDOWN and self._drain_is_over():
                return self._drained(is_running)
            return Farewell(*describe_abort(cause, rank, self._control.abort_requests()))
        if self._supervisor_fd >= 0 and select.select([self._supervisor_fd], [], [], 0)[0]:
            return Farewell(ErrorCode.ENGINE_LOST, "the launcher of the engine died; start the engine again", 4)
        if self.draining and (is_idle or self._drain_is_over()):
            return self._drained(is_running)
        return None

    def _drain_is_over(self) -> bool:
        return self._drain_deadline is not None and self._drain_deadline.expired()

    def _drained(self, is_running: bool) -> Farewell:
        return Farewell.drained(self._drain_s, is_cut=is_running)
