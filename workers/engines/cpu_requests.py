"""One request on a CPU rank: what it has in the next pass, and what becomes of it."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kog_dist.decode.cpu.cursor import PassPart
from kog_dist.decode.cpu.interpreter import Interpreter, StepOutput
from kog_dist.decode.drafts import NO_DRAFT, Drafter
from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.request import DecodeRequest, KvCopyKind, KvUse
from kog_dist.late_numpy import Array
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NO_TOKEN, NOT_DRAFTED, Drafted, Finish
from kog_dist.runtime.stages import RankStage
from kog_dist.workers.engines.forced_drafts import ForcedDrafts
from kog_dist.workers.engines.root_choice import RootChoice


class CpuRequest:
    """From its beginning to its last entry in the token ring, pass by pass. All ranks do the same with it.

    `finish`: why it has ended; NONE until then, and then it is in no pass any more.
    """

    def __init__(
        self,
        seq: int,
        request: DecodeRequest,
        control: ControlPage,
        interpreter: Interpreter,
        copy: Callable[[KvUse], None],
        *,
        root: RootChoice | None,
        drafter: Drafter | None,
        forced: ForcedDrafts | None,
    ) -> None:
        """`copy`: makes copies of blocks and states. `root`: of rank 0, where it chooses or reports from all logits. `drafter`:
        None if each token has a pass of its own.
        """
        self.seq, self.request, self.slot = seq, request, request.decode_slot
        self._control, self._interpreter, self._copy = control, interpreter, copy
        self._root, self._drafter, self._forced = root, drafter, forced
        self._rank, self._spec = interpreter.rank, interpreter.plan.spec
        self.finish = Finish.NONE
        self._position = request.kv.num_cached  # of the next token that goes through the model
        self._index = 0  # of the next token of the answer
        self._token_id = request.prompt[-1]  # the newest one, once the prompt is read
        self._saves = deque(copy for copy in request.kv.copies if copy.kind is KvCopyKind.SAVE_STATE)
        self._next_forced: Sequence[int] = ()  # what the grammar forces in the next pass
        self._draft, self._told = NO_DRAFT, list[int]()  # of the pass; tokens of it that are in the ring already
        self._use_cache(request.kv)
        self._save_states(self._position)
        self._moved()
        self._stamp_read()

    def _use_cache(self, use: KvUse) -> None:
        kinds = KvCopyKind
        if blocks := tuple(copy for copy in use.copies if copy.kind is kinds.LOAD):
            self._copy(KvUse(use.cache, use.source, use.num_cached, blocks))
            self._interpreter.filled(use.source, use.num_cached)
        states = tuple(copy for copy in use.copies if copy.kind is kinds.LOAD_STATE)
        load = partial(self._copy, KvUse(use.cache, use.source, use.num_cached, states)) if states else None
        self._interpreter.use_cache(use.cache, use.source, use.num_cached, load)

    # ---- the prompt ----
    @property
    def num_unread(self) -> int:
        """Tokens of the prompt before its last that are not in the KV cache yet, up to the next copy of the state."""
        end = len(self.request.prompt) - 1
        return min([end, *(save.place for save in self._saves)]) - self._position

    @property
    def reads(self) -> bool:
        """Whether the prompt is not read yet."""
        return self._position < len(self.request.prompt) - 1

    def prompt_part(self, num_tokens: int, *, stop: bool) -> PassPart:
        """The next so many tokens of the prompt."""
        tokens = self.request.prompt[self._position : self._position + num_tokens]
        return PassPart(tokens, self._position, None, self.request.kv.cache, stop)

    def was_read(self, num_tokens: int, *, stopped: bool) -> None:
        """They are in the cache; `stopped`: rank 0 wants to end the request."""
        self._position += num_tokens
        self._moved()
        self._save_states(self._position)
        if stopped:
            self.cancel()
        else:
            self._stamp_read()

    def _stamp_read(self) -> None:
        if not self.reads:
            self._control.stamp(self._rank, RankStage.PREFILLED, self.slot)

    # ---- the answer ----
    @property
    def needs_all_logits(self) -> bool:
        """Whether rank 0 needs all logits."""
        return self.request.logit_digests or self.request.needs_all_logits

    @property
    def lacks_first_mask(self) -> bool:
        """Whether its grammar has not said yet what the answer may begin with. Rank 0 asks."""
        epoch = self.request.mask_epoch
        return bool(epoch) and not self._index and self._control.mask_slots[self.slot].get(epoch) is None

    def outlook(self, most: int, *, has_company: bool) -> Sequence[float]:
        """See `Drafter.outlook`: of drafts in a pass, `most` at most. Before each `answer_part`, which drafts some of them."""
        if self._drafter is None:
            return ()
        self._next_forced = () if self._forced is None else self._forced.next(self._index, waits=not has_company)
        return self._drafter.outlook(self._most_drafts(most), self._next_forced)

    def _most_drafts(self, most: int) -> int:
        return min(self.request.max_tokens - self._index - 1, self._spec.max_context - 2 - self._position, most)

    def answer_part(self, num_drafts: int, *, stop: bool) -> PassPart:
        """The newest token, and drafts of those behind it, `num_drafts` at most."""
        self._draft, self._told = NO_DRAFT, []
        if self._drafter is not None:
            self._draft = self._drafter.draft(self._most_drafts(num_drafts), self._next_forced)
        choose = None
        if self._root is not None:
            self._root.begin_pass(self._position, self._tell)
            choose = self._root.choose
        tokens = (self._token_id, *self._draft.token_ids)
        return PassPart(tokens, self._position, self.request.sampling, self.request.kv.cache, stop, choose)

    def took(self, outputs: Sequence[StepOutput]) -> None:
        """What came of its part of a pass."""
        if self._index == 0:
            self._control.stamp(self._rank, RankStage.CHOSEN, self.slot)
        ends = [self._finish(output, idx) for idx, output in enumerate(outputs)]
        num = next((idx + 1 for idx, finish in enumerate(ends) if finish is not Finish.NONE), len(ends))
        end, cache = self._position + num, self.request.kv.cache
        self._save_states(end)
        self._interpreter.settle(end, cache)  # before another request's drafts take the place of these
        self._moved(end)
        drafted = Drafted(len(self._draft.token_ids), len(outputs) - 1, self._draft.is_predicted)
        for idx in range(len(self._told), num):
            self._hand_out(outputs[idx], self._index + idx, ends[idx], NOT_DRAFTED if idx + 1 < num else drafted)
        if ends[num - 1] is not Finish.NONE:
            self._interpreter.go_back(end, cache)  # the pass may have gone beyond the end
            self.finish = ends[num - 1]
            return
        if self._drafter is not None:
            self._drafter.took([output.token_id for output in outputs])
        self._token_id, self._index, self._position = outputs[-1].token_id, self._index + num, end

    def cancel(self) -> None:
        """End it where it is, behind a pass that it was not in, or that read its prompt."""
        self._put(self._index, NO_TOKEN, None, None, Finish.CANCELLED)
        self.finish = Finish.CANCELLED

    def _tell(self, idx: int, token_id: int, logits: Array) -> bool:
        """Put a token of the pass into the ring while the pass runs, for the grammar process; false: the answer ends with it."""
        output = StepOutput(token_id, logits, True, False)
        if self._finish(output, idx) is not Finish.NONE:
            return False
        self._hand_out(output, self._index + idx, Finish.NONE, NOT_DRAFTED)
        self._told.append(token_id)
        return True

    def _finish(self, output: StepOutput, idx: int) -> Finish:
        """Whether the answer ends with what was chosen behind token `idx` of its part of the pass."""
        if output.stopped:  # why rank 0 found nothing to choose, it alone knows
            failure = Finish.NONE if self._root is None else self._root.failure
            return failure if failure is not Finish.NONE else Finish.CANCELLED
        if not output.finite:
            return Finish.NUMERICAL_FAULT
        if output.token_id in self.request.end_ids:
            return Finish.STOP
        is_full = self._index + idx + 1 >= self.request.max_tokens or self._position + idx + 2 >= self._spec.max_context
        return Finish.LENGTH if is_full else Finish.NONE

    def _hand_out(self, output: StepOutput, index: int, finish: Finish, drafted: Drafted) -> None:
        """Rank 0 puts a token of the answer into the ring, or that there is none."""
        if finish in (Finish.CANCELLED, Finish.NUMERICAL_FAULT, Finish.NO_MASK):
            self._put(index, NO_TOKEN, None, None, finish, drafted)
            return
        root, logits = self._root, output.logits
        logprobs = root.logprobs(output.token_id, logits) if root is not None and logits is not None else None
        self._put(index, output.token_id, logits if self.request.logit_digests else None, logprobs, finish, drafted)

    def _put(
        self,
        index: int,
        token_id: int,
        digested: Array | None,
        logprobs: TokenLogprobs | None,
        finish: Finish,
        drafted: Drafted = NOT_DRAFTED,
    ) -> None:
        """Rank 0 hands a token out, with a digest of the logits `digested`; nothing once the engine is being stopped."""
        if self._rank != 0 or self._control.aborted():
            return
        digest = None
        if digested is not None:
            digest = hashlib.sha256(digested.astype("<f4", copy=False).tobytes()).digest()
        ring = self._control.rings[self.slot]
        ring.put(self.seq, index, token_id, time.monotonic_ns(), digest, finish, logprobs, drafted)

    # ---- both ----
    def _moved(self, num_positions: int | None = None) -> None:
        """Say how much the KV cache holds; the last time is before the last entry."""
        held = self._position if num_positions is None else num_positions
        self._control.set_progress(self._rank, self.seq, held, self.slot)

    def _save_states(self, num_positions: int) -> None:
        """Make those copies of the state that are due: the request has come so far."""
        use = self.request.kv
        while self._saves and self._saves[0].place <= num_positions:
            self._interpreter.settle(self._saves[0].place, use.cache)
            self._copy(KvUse(use.cache, use.source, use.num_cached, (self._saves.popleft(),)))
