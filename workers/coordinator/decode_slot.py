"""The coordinator's grip on the ranks: requests through the control page, each in a decode slot, and their tokens back."""

from __future__ import annotations

import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.ring import NO_TOKEN, Finish, TokenEntry
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.wait import Deadline, wait
from kog_dist.workers.coordinator.kept_answers import MOST_RECALLED, KeptAnswers
from kog_dist.workers.coordinator.kept_blocks import KeptBlocks, num_common
from kog_dist.workers.coordinator.kept_caches import KeptCaches
from kog_dist.workers.coordinator.kept_states import KeptStates

# How long the first token is looked for without sleeping, from a stage on of which rank 0 tells: a core that sleeps takes 0.1 to
# 0.3 ms to wake. A short prompt is through by then; the end of prefill comes some 50 us before the token.
LOOKS_S = {RankStage.LAUNCHED: 0.006, RankStage.PREFILLED: 0.001}
_POLL_S, _POLL_OF_SHARED_CORES_S = 0.002, 0.005  # some 5 % of one, and 2 %
_WORTH_WAITING = 64  # tokens of a prompt that another request reads, from which on it is waited for
MAX_ENTRIES = 64  # of one read, so that an event stays small and the loop responsive


class DecodeSlot:
    """One request at a time: occupied until the ranks' last entry of it, also when nobody wants the tokens any more."""

    def __init__(self, control: ControlPage, number: int, end: Callable[[DecodeSlot, Finish], None]) -> None:
        """`end`: called when the ranks have ended the request, while the slot still has it."""
        self._control, self.number, self._end = control, number, end
        self.seq: int | None = None  # of the current request,
        self.scope = ""  # whose KV may be used by requests of the same alone
        self.cache = 0  # KV cache that it runs in
        self.submitted_ns = 0
        self._next_index = 0
        self._num_cached = self.num_prompt = 0
        self._sequence = array("I")  # prompt and answer of the current request

    @property
    def busy(self) -> bool:
        """Whether ranks may still write entries of the current request."""
        return self.seq is not None

    @property
    def position(self) -> int:
        """Tokens of the current request, prompt and answer, that are in the KV cache; 0 without one."""
        if self.seq is None:
            return 0
        progress = self._control.progress(self.seq, self.number)
        return self._num_cached if progress is None else progress

    def num_common(self, prompt: Sequence[int]) -> int:
        """Tokens that the current request and a prompt begin with, but for the prompt's last."""
        return num_common(self._sequence, array("I", prompt)[:-1])

    @property
    def held(self) -> array[int]:
        """The tokens that are in the KV cache, as far as they have been read from the ring."""
        return self._sequence[: self.position]

    @property
    def sequence(self) -> array[int]:
        """The prompt of the current request, `num_prompt` tokens, and what has been read of its answer."""
        return self._sequence

    def stages_ns(self) -> list[int]:
        """When rank 0 came to each RankStage, of this request or of one before."""
        return self._control.stages_ns(0, self.number)

    def begin(self, request: DecodeRequest, scope: str) -> None:
        """Hand a request to the ranks, with this slot's number and its KV cache; the slot is free."""
        self.seq, self.cache, self.scope = self._control.submit(request), request.kv.cache, scope
        self.submitted_ns = self._control.submitted_ns
        self._next_index, self._num_cached, self._sequence = 0, request.kv.num_cached, array("I", request.prompt)
        self.num_prompt = len(request.prompt)

    def cancel(self) -> None:
        """Ask the ranks to end the current request early; the slot stays busy until they have."""
        if self.seq is not None:
            self._control.cancel(self.seq, self.number)

    def has_entry(self) -> bool:
        """Whether some of the next entry is there."""
        return self.seq is not None and self._control.rings[self.number].is_begun(self.seq, self._next_index)

    def read(self) -> list[TokenEntry]:
        """The next entries that have come, in order, at most MAX_ENTRIES. The last entry of a request frees the slot."""
        entries: list[TokenEntry] = []
        while self.seq is not None and len(entries) < MAX_ENTRIES:
            entry = self._control.rings[self.number].get(self.seq, self._next_index)
            if entry is None:
                break
            entries.append(entry)
            self._next_index += 1
            if entry.token_id != NO_TOKEN:
                self._sequence.append(entry.token_id)
            if entry.finish is not Finish.NONE:
                self._end(self, entry.finish)
                self.seq, self._sequence = None, array("I")
        return entries

    def wait(self, timeout_s: float, poll_s: float, interrupted: Callable[[], bool], *, looks: bool) -> None:
        """Block until the next entry is there, or one of another slot; see `DecodeSlots.wait`. `looks`: for the first token."""
        seq, index, ring = self.seq, self._next_index, self._control.rings[self.number]
        assert seq is not None

        def is_near() -> bool:
            return looks and self._look_s() > 0

        ring.wait(seq, index, Deadline.after(timeout_s), poll_s=poll_s, interrupted=lambda: interrupted() or is_near())
        if looks and (look_s := self._look_s()) > 0:
            deadline = Deadline.after(min(timeout_s, look_s))
            wait(lambda: ring.is_begun(seq, index), aborted=interrupted, deadline=deadline, yields=sys.maxsize)

    def _look_s(self) -> float:
        """Seconds for which the first token is to be looked for from now on; 0: it does not come yet, or is late, or is there."""
        if self._next_index:
            return 0.0
        stages_ns, begin_ns = self.stages_ns(), self.submitted_ns
        ends_ns = [stages_ns[stage] + 1e9 * look_s for stage, look_s in LOOKS_S.items() if stages_ns[stage] >= begin_ns]
        return (max(ends_ns) - time.monotonic_ns()) / 1e9 if ends_ns else 0.0


class DecodeSlots:
    """All of them, as many as the control page has, and the books of what the ranks keep.

    `window`: of the model's windowed layers, None if it has none. `is_recurrent`: see `KeptCaches`.
    """

    def __init__(self, control: ControlPage, window: int | None, *, is_recurrent: bool = False) -> None:
        self._control, self._window, self._is_recurrent = control, window, is_recurrent
        self._caches: KeptCaches | None = None  # known once the ranks are ready
        self._copies: deque[DecodeRequest] = deque()  # to the block pool, which come before any other request
        self._answers = KeptAnswers()
        self.slots = [DecodeSlot(control, number, self._ended) for number in range(len(control.rings))]

    @property
    def busy(self) -> list[DecodeSlot]:
        """Those that have a request."""
        return [slot for slot in self.slots if slot.busy]

    @property
    def kept_blocks(self) -> KeptBlocks | None:
        """What the block pool holds; None without one, or before the first request."""
        return None if self._caches is None else self._caches.blocks

    @property
    def kept_states(self) -> KeptStates:
        """Which copies of states there are; none of a model without a state, or before the first request."""
        return KeptStates(0) if self._caches is None else self._caches.states

    @property
    def ring_positions(self) -> int:
        """Positions that windowed layers keep; 0 if there are none or they keep all, or before the first request."""
        return 0 if self._caches is None else self._caches.ring_positions

    def is_being_read(self, prompt: Sequence[int], scope: str, commons: dict[int, int]) -> bool:
        """Whether a running request of the same scope still has to read _WORTH_WAITING tokens that the prompt begins with, too.

        Who waits for that copies them, and is done sooner than by reading them as well, in turns. Never where they cannot be
        copied at any place: states, windows that keep the newest positions alone. `commons`: the prompt's, by running request;
        they are counted once.
        """
        if self._is_recurrent or self.ring_positions:
            return False
        for slot in self.busy:
            if slot.scope != scope or slot.seq is None:
                continue
            if slot.seq not in commons:
                commons[slot.seq] = slot.num_common(prompt)
            if commons[slot.seq] - slot.position >= _WORTH_WAITING:
                return True
        return False

    def free(self) -> list[DecodeSlot]:
        """Slots for the next request; none while its block is not free, or copies are to be made first."""
        self.copy()
        if self._copies or not self._control.may_submit():
            return []
        return [slot for slot in self.slots if not slot.busy]

    def copy(self) -> None:
        """Have copies made that are due, as far as there are request blocks for them."""
        while self._copies and self._control.may_submit():
            self._control.submit(self._copies.popleft())

    def submit(
        self, slot: DecodeSlot, request: DecodeRequest, *, reuse_kv: bool, scope: str = "", recalls: bool = False
    ) -> DecodeRequest:
        """Hand a request to the ranks, which are ready, in a slot that is `free`. Returns it with the KV cache that it runs in.

        `reuse_kv`: positions that an earlier request of the same `scope` left there may count. `recalls`: what such requests
        were answered stands in for a prediction.
        """
        assert slot in self.free(), "a request has a slot and a block"
        if self._caches is None:
            layout, parallel = self._control.kv_layout(), len(self.slots)
            self._caches = KeptCaches(layout, self._window, is_recurrent=self._is_recurrent, parallel=parallel)
        for other in self.busy:
            self._caches.moved(other.cache, other.held)
        num_answer = min(request.max_tokens, self._control.max_context - len(request.prompt))
        use = self._caches.take(request.prompt, reuse=reuse_kv, scope=scope, num_answer=num_answer)
        request = request.at(use, slot.number)
        if recalls and not request.prediction:
            most = min(MOST_RECALLED, self._control.max_context)
            request = replace(request, prediction=self._answers.recall(scope, array("I", request.prompt), most))
        slot.begin(request, scope)
        return request

    def wait(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Block until the next entry of any request is there, at most `timeout_s`; `interrupted` is asked every 2 ms, or 5 if
        ranks may share the coordinator's core.

        The first token of a request that is alone is looked for without sleeping when it is about to come (LOOKS_S).
        """
        busy = self.busy
        if not busy:
            return
        first, *others = busy
        poll_s = _POLL_S if self._control.heeds_rousing() else _POLL_OF_SHARED_CORES_S
        if not others:
            first.wait(timeout_s, poll_s, interrupted, looks=True)
            return

        def is_due() -> bool:
            return interrupted() or any(other.has_entry() for other in others)

        first.wait(timeout_s, poll_s, is_due, looks=False)

    def _ended(self, slot: DecodeSlot, finish: Finish) -> None:
        assert self._caches is not None
        if finish is Finish.NUMERICAL_FAULT:
            self._caches.forget(slot.cache)
            return
        position = slot.position
        self._answers.add(slot.scope, slot.sequence, slot.num_prompt)
        self._caches.give_back(slot.held, position, position, slot.cache)
        if (kept := self._caches.save(slot.cache)) is not None:  # while nobody waits: what comes next is queued behind it
            self._copies.append(DecodeRequest((0,), 1, kv=kept, only_copies=True))
            self.copy()
