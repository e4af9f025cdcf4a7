"""The requests that run at the same time on a GPU rank: they take turns, and share passes where they can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.ring import Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.engines.cuda_answers import CudaAnswers
from kog_dist.workers.engines.cuda_caches import CudaCaches
from kog_dist.workers.engines.cuda_drafting import CudaDrafting
from kog_dist.workers.engines.cuda_first_mask import FirstMasks
from kog_dist.workers.engines.cuda_launcher import CudaLauncher
from kog_dist.workers.engines.cuda_prompts import PromptReader
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.cuda_sharing import SharedPasses
from kog_dist.workers.engines.cuda_turn import Decision
from kog_dist.workers.engines.launches import COMPANY_STEPS
from kog_dist.workers.intake import Intake

_ENDED = object()


class CudaRequests:
    """Of one rank. Each rank runs the same ones, and in a turn does what rank 0 has decided."""

    def __init__(self, gpu: CudaRank, caches: CudaCaches, drafting: CudaDrafting) -> None:
        self._gpu, self._caches, self._drafting = gpu, caches, drafting
        self._launcher = CudaLauncher(gpu, caches, drafting)
        self.prompts = PromptReader(gpu, caches, self._launcher)
        self._masks = FirstMasks(gpu)
        self._answers = CudaAnswers(gpu, caches)
        self._shared = SharedPasses(gpu, drafting, self._answers)

    def run(self, seq: int, request: DecodeRequest, intake: Intake | None) -> Finish:
        """See `Engine.run`. Requests that come meanwhile take turns with it, where there are slots for several."""
        first = self._taken(seq, request)
        running, self._gpu.intake = [first], intake
        while running:
            if len(running) > 1 and self._gpu.control.aborted():
                self._gpu.leave(f"left requests {', '.join(f'{one.seq}' for one in running)}")
            sharing = self._shared.sharing(running)
            decision = self._decided(running, sharing)
            running += self._new(decision.num_new)
            self._turns(running, sharing, decision)
            running = [one for one in running if one.finish is Finish.NONE]
        return first.finish

    def _decided(self, running: Sequence[CudaRequest], sharing: Sequence[CudaRequest]) -> Decision:
        """What a turn goes by that ranks might see differently. Collective."""
        may_begin = sum(1 << one.slot for one in running if self._masks.need_not_wait(one))
        own = Decision(self._gpu.num_new, self._drafting.gain_from_turns(sharing), may_begin)
        return Decision.unpack(self._gpu.shared(own.pack()))

    def _new(self, num_new: int) -> list[CudaRequest]:
        """So many of those that have come, but for requests that are nothing but copies, which are queued."""
        taken, intake = list[CudaRequest](), self._gpu.intake
        for _ in range(num_new):
            assert intake is not None
            seq, request = intake.take()
            if request.only_copies:
                self._caches.copy(request.kv)
            else:
                taken.append(self._taken(seq, request))
        return taken

    def _taken(self, seq: int, request: DecodeRequest) -> CudaRequest:
        """A request whose beginning is on its way to its KV cache, as far as it is kept."""
        held, saves = self._caches.begin(seq, request.kv)
        self._gpu.control.set_progress(self._gpu.rank, seq, held, request.decode_slot)
        one = CudaRequest(seq, request, held, saves)
        one.reads = self.prompts.takes(one)
        return one

    def _turns(self, running: list[CudaRequest], sharing: Sequence[CudaRequest], decision: Decision) -> None:
        """One of each that runs, in the order of `running`; behind it comes whoever read a prompt, once a chunk is read."""
        together = () if decision.have_drafts else sharing
        reader, waiting = _readers(running)
        turns = [one for one in running if one not in together and one not in waiting]
        num_decoding = sum(not one.reads for one in turns) + bool(together)
        # Who decodes waits for the others and for a part of a prompt.
        num_steps = 1 if reader is not None and num_decoding > 1 else COMPANY_STEPS
        for one in turns:
            self._turn(one, running, num_steps, decision)
        if reader is not None and reader.reading is None:  # the next chunk is another one's
            running.remove(reader)
            running.append(reader)
        if together:  # who has just begun goes on with them, and waits for no other prompt
            together = [one for one in running if one.shares and one.finish is Finish.NONE]
            self._shared.run(together, running, num_steps)

    def _turn(self, one: CudaRequest, running: Sequence[CudaRequest], num_steps: int, decision: Decision) -> None:
        """A chunk of its prompt, of which others that decode let it have a part, or so many steps of its answer, of which the
        first has a launch of its own; all of both where no other request can come.
        """
        gpu, in_company = self._gpu, len(running) > 1
        one.company_steps = (1 if one.launches is None else num_steps) if in_company else 0
        one.others_decode = any(not other.reads for other in running)
        meets = gpu.peers is not None and gpu.takes_turns  # so each turn has what is queued at its beginning

        def holds() -> bool:
            return in_company or meets or gpu.num_new > 0

        gpu.kernel.use(one.slot)
        begins = one.launches is None
        if one.reads and not self._has_read(one, running):
            return
        if one.launches is None and not self._has_begun(one, holds, decision if meets else None):
            return
        assert one.launches is not None
        if not begins:
            one.launches.turn(one.index, one.company_steps)
        elif one.held > one.request.kv.num_cached:
            gpu.tell(RankStage.PREFILLED, one.slot)
        self._answers.decode(one, holds)

    def _has_read(self, one: CudaRequest, running: Sequence[CudaRequest]) -> bool:
        """Read on in its prompt, unless another one's is in the way: whether that is done."""
        if one.reading is None:
            if any(other.has_streams or other.reading is not None for other in running):
                return False
            one.reading = self.prompts.read(one)
        if next(one.reading, _ENDED) is not _ENDED:
            return False
        one.reading = None
        return not one.reads

    def _has_begun(self, one: CudaRequest, holds: Callable[[], bool], decision: Decision | None) -> bool:
        """Queue its first launches, unless it waits for its first mask."""
        if one.request.mask_epoch and not self._masks.may_begin(one, holds, decision):
            return False
        one.launches = self._launcher.begin(one, one.held)
        return True


def _readers(running: Sequence[CudaRequest]) -> tuple[CudaRequest | None, Sequence[CudaRequest]]:
    """Whose prompt is read now, if any, and whose not: where others decode they wait for a part of a chunk of one of them."""
    reading = [one for one in running if one.reads]
    if not reading:
        return None, ()
    reader = next((one for one in reading if one.reading is not None), reading[0])
    is_alone = len(reading) == len(running) and reader.reading is None
    return reader, () if is_alone else [one for one in reading if one is not reader]
