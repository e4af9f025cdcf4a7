"""Passes of the weights that several requests of a GPU rank share: one token of each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from kog_dist.cuda.device_array import DeviceEvent
from kog_dist.runtime.ring import Finish
from kog_dist.workers.engines.cuda_answers import CudaAnswers
from kog_dist.workers.engines.cuda_drafting import CudaDrafting
from kog_dist.workers.engines.cuda_rank import POLL_S, CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.launches import ANSWER_STEPS, CHUNKS_QUEUED


class SharedPasses:
    """Of one rank."""

    def __init__(self, gpu: CudaRank, drafting: CudaDrafting, answers: CudaAnswers) -> None:
        self._gpu, self._drafting, self._answers = gpu, drafting, answers

    def sharing(self, running: Sequence[CudaRequest]) -> Sequence[CudaRequest]:
        """Those that may share passes now: at least two. Drafts need passes of a request's own, so it has none meanwhile."""
        sharing = [one for one in running if one.shares] if len(running) > 1 and self._gpu.kernel.most_together() > 1 else []
        for one in running if self._gpu.rank == 0 else ():
            if one.shares and not one.is_followed and len(sharing) > 1:
                self._drafting.follow(one)
            one.is_followed = one.gain is not None and len(sharing) > 1
        return sharing if len(sharing) > 1 else []

    def run(self, together: Sequence[CudaRequest], running: Sequence[CudaRequest], num_steps: int) -> None:
        """Passes with a token of each of these that goes on, so many in a launch, or more where nobody else runs, until one of
        them ends or another request wants its turn; what they give is handed out as it comes. Where they are too many for a pass
        they have one in turn. They also end where a copy of somebody's state is due.
        """
        gpu, kernel, queued = self._gpu, self._gpu.kernel, deque[DeviceEvent]()
        most = kernel.most_together()
        groups = [[one.slot for one in together[number : number + most]] for number in range(0, len(together), most)]
        num_launches, have_others = 0, len(together) < len(running)
        reads_tokens = not all(one.index for one in together)  # whose prompts go token by token: progress is told behind a launch
        is_long = len(groups) == 1 and not have_others and not reads_tokens
        stops = [steps for one in together if (steps := one.num_steps_to_stop) is not None]
        num_left = min(stops, default=gpu.max_context)  # passes; without stops all have ended by then

        def is_over() -> bool:
            if have_others or reads_tokens or gpu.num_new > 0 or self._drafting.gain_from_turns(together):
                return True
            return any(one.finish is not Finish.NONE or one.is_ending for one in together)

        def goes_on() -> bool:
            if num_launches < len(groups):
                return True
            if not num_left and num_launches % len(groups) == 0:
                return False
            # All ranks queue as many; what rank 0 ends early ends on all of them.
            return not is_over() if gpu.peers is None else is_long and num_launches < CHUNKS_QUEUED

        while True:
            while queued and queued[0].done:
                queued.popleft()
            while len(queued) < CHUNKS_QUEUED and goes_on():  # so the next passes begin without the host
                if num_launches % len(groups) == 0:  # the next round
                    num_steps = min(ANSWER_STEPS if is_long else num_steps, num_left)
                    num_left -= num_steps
                kernel.launch_together(groups[num_launches % len(groups)], num_steps)
                queued.append(kernel.stream.record())
                num_launches += 1
            if is_long and is_over():
                kernel.leave_early()
            if gpu.control.aborted():
                gpu.leave(f"left requests {', '.join(f'{one.seq}' for one in together)}")
            has_ended = kernel.is_idle()
            for one in together:
                if one.finish is Finish.NONE:
                    self._take(one, has_ended=has_ended)
            if has_ended and num_launches >= len(groups):
                break
            time.sleep(POLL_S)
        kernel.finish()
        gpu.heartbeat.progress()
        for one in together:
            if one.finish is Finish.NONE and (one.index == 0 or one.num_steps_to_stop is not None):
                self._went_on(one)

    def _went_on(self, one: CudaRequest) -> None:
        """Note how far the passes have brought a request; make the copy of its state that is due there."""
        assert one.launches is not None
        self._gpu.kernel.use(one.slot)
        position = int(self._gpu.kernel.state()["position"])
        one.launches.went_on(position)
        if one.index == 0:  # its prompt goes token by token
            self._answers.tell_progress(one, min(position, len(one.request.prompt) - 1))

    def _take(self, one: CudaRequest, *, has_ended: bool) -> None:
        """Hand out what shared passes have given of a request. `has_ended`: all that were queued had, before this was called."""
        kernel = self._gpu.kernel
        kernel.use(one.slot)
        self._answers.heed_cancel(one)
        while one.finish is Finish.NONE and (token := kernel.token(one.index)) is not None:
            one.is_ending = token.finish is not Finish.NONE
            is_whole = token.finish in (Finish.STOP, Finish.LENGTH)  # its cache holds all in front of this token
            if one.is_ending and not has_ended and not is_whole:
                return
            self._answers.take(one, token, is_whole=is_whole)
            self._gpu.heartbeat.progress()
