"""What a GPU rank has once it is started, and what everyone who works with it needs: its launches awaited, its peers asked."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NoReturn

from kog_dist.decode.request import DecodeRequest
from kog_dist.errors import AbortedError
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.engines.heartbeat import Heartbeat

if TYPE_CHECKING:
    from kog_dist.workers.engines.choice_check import ChoiceCheck
    from kog_dist.workers.engines.cuda_peers import CudaPeers
    from kog_dist.workers.engines.cuda_start import Prefiller
    from kog_dist.workers.engines.launches import DecodeKernel
    from kog_dist.workers.intake import Intake

HEARTBEAT_MARGIN_S = 2.5  # a wait that runs out of time says more than silence, so it comes first: after 2.25 s among peers
POLL_S = 20e-6


class CudaRank:
    """One rank's. `CudaEngine.startup` fills in what it has: `loaded` is its kernel, None before that."""

    def __init__(self, args: WorkerArgs, control: ControlPage) -> None:
        self.args, self.control, self.rank = args, control, args.info.rank
        self.heartbeat = Heartbeat(control, self.rank, args.step_timeout_s + HEARTBEAT_MARGIN_S)
        self.loaded: DecodeKernel | None = None
        self.peers: CudaPeers | None = None  # None: one rank
        self.prefill: Prefiller | None = None  # None: the kernel takes prompts token by token
        self.choices: ChoiceCheck | None = None  # None: nobody compares which experts are chosen
        self.intake: Intake | None = None  # of the requests that come while some run
        self.max_context = 0

    @property
    def kernel(self) -> DecodeKernel:
        """The kernel of a rank that has been started."""
        assert self.loaded is not None, "startup comes first"
        return self.loaded

    @property
    def takes_turns(self) -> bool:
        """Whether several requests run. Choices of experts are of one."""
        return self.args.parallel > 1 and self.choices is None

    @property
    def num_new(self) -> int:
        """Requests that have come and are not taken yet, where several run."""
        return self.intake.num_new if self.intake is not None and self.takes_turns else 0

    def max_tokens(self, request: DecodeRequest) -> int:
        """How long its answer may become."""
        return min(request.max_tokens, self.max_context - len(request.prompt))

    def shared(self, number: int) -> int:
        """Rank 0's, where several ranks take turns. Collective."""
        return number if self.peers is None or not self.takes_turns else self.peers.share_number(number)

    def tell(self, stage: RankStage, slot: int) -> None:
        """Stamp a stage from which on the coordinator looks for the first token."""
        self.control.stamp(self.rank, stage, slot)
        if self.rank == 0:
            self.control.rings[slot].announce()

    def compare_choices(self) -> None:
        """Of experts, if anybody does; all launches have ended. Collective."""
        if self.choices is not None:
            self.choices.compare(self.kernel)

    def await_launches(self, doing: str) -> None:
        """Wait for all launches, without blocking in the driver. An abort ends them at once, else their own limits do.

        Raises AbortedError, which says what the rank was `doing`.
        """
        while not self.kernel.is_idle():
            if self.control.aborted():
                self.leave(doing)
            time.sleep(POLL_S)

    def leave(self, doing: str) -> NoReturn:
        """Have the kernel leave its waits, and raise AbortedError."""
        self.kernel.abort()
        self.kernel.stream.synchronize()  # bounded: the kernel leaves its waits within microseconds of the abort
        raise AbortedError(f"rank {self.rank} {doing} because the engine is being stopped")
