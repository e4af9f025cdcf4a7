"""When the launches of a request with a grammar begin on a GPU rank: once its first mask is there."""

from __future__ import annotations

import time
from collections.abc import Callable

from kog_dist.runtime.wait import Deadline, WaitResult, wait
from kog_dist.workers.engines.cuda_rank import POLL_S, CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.cuda_turn import Decision

_TIMEOUT_S = 5.0


class FirstMasks:
    """Of a rank's requests. A mask comes once the grammar is compiled, which may take longer than a kernel should wait."""

    def __init__(self, gpu: CudaRank) -> None:
        self._gpu = gpu

    @property
    def _patience_s(self) -> float:
        return min(_TIMEOUT_S, self._gpu.args.step_timeout_s / 2)

    def need_not_wait(self, one: CudaRequest) -> bool:
        """Whether its launches may begin, if it waits for its first mask: the mask is there, or will not come any more."""
        epoch, control = one.request.mask_epoch, self._gpu.control
        if not epoch or one.waits_since_s is None:
            return False
        is_there = control.mask_slots[one.slot].get(epoch) is not None or control.cancelled(one.seq, one.slot)
        return is_there or time.monotonic() > one.waits_since_s + self._patience_s

    def may_begin(self, one: CudaRequest, holds: Callable[[], bool], decision: Decision | None) -> bool:
        """Whether its launches may begin. False: it holds, so that others have their turns meanwhile.

        All ranks look at the same memory, but where they take turns at what rank 0 has seen there (`decision`). If it does not
        come, or the request is cancelled, the kernel says so after the prompt.
        """
        if one.waits_since_s is None:
            one.waits_since_s = time.monotonic()
        is_there = self._has_come(one, one.waits_since_s, holds) if decision is None else decision.begins(one.slot)
        if not is_there:
            time.sleep(POLL_S)
            return False
        one.waits_since_s = None
        self._gpu.heartbeat.progress()
        return True

    def _has_come(self, one: CudaRequest, since_s: float, holds: Callable[[], bool]) -> bool:
        """Wait until it has come, or will not come any more; False if the request is to hold before."""
        deadline = Deadline.after(max(since_s + self._patience_s - time.monotonic(), 0.0))
        aborted = self._gpu.control.aborted
        result = wait(lambda: self.need_not_wait(one) or holds(), aborted=aborted, deadline=deadline)
        if result is WaitResult.ABORT:
            self._gpu.leave(f"left request {one.seq}")
        return not holds() or deadline.expired() or self.need_not_wait(one)
