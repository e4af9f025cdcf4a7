"""The coordinator's grip on the ranks: one request at a time through the control page, its tokens back through the ring."""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable

from kog_dist.decode.request import DecodeRequest
from kog_dist.decode.ring import NO_TOKEN, Finish, TokenEntry
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.stages import RankStage
from kog_dist.runtime.wait import Deadline, wait
from kog_dist.workers.coordinator.kept_blocks import KeptBlocks
from kog_dist.workers.coordinator.kept_caches import KeptCaches
from kog_dist.workers.coordinator.kept_states import KeptStates

# How long the first token is looked for without sleeping, from a stage on of which rank 0 tells: a core that sleeps takes 0.1 to
# 0.3 ms to wake. A short prompt is through by then; the end of prefill comes some 50 us before the token.
LOOKS_S = {RankStage.LAUNCHED: 0.006, RankStage.PREFILLED: 0.001}
_POLL_S, _POLL_OF_SHARED_CORES_S = 0.002, 0.005  # some 5 % of one, and 2 %
MAX_ENTRIES = 64  # of one read, so that an event stays small and the loop responsive


class DecodeSlot:
    """Occupied from `submit` until the ranks' last entry, also when nobody wants the tokens any more.

    `window`: of the model's windowed layers, None if it has none. `is_recurrent`: see `KeptCaches`.
    """

    def __init__(self, control: ControlPage, window: int | None, *, is_recurrent: bool = False) -> None:
        self._control, self._window, self._is_recurrent = control, window, is_recurrent
        self._caches: KeptCaches | None = None  # known once the ranks are ready
        self._seq: int | None = None
        self._next_index = 0
        self._num_cached = 0
        self._sequence = array("I")  # prompt and answer of the current request

    @property
    def busy(self) -> bool:
        """Whether ranks may still write entries of the current request."""
        return self._seq is not None

    @property
    def position(self) -> int:
        """Tokens of the current request, prompt and answer, that are in the KV cache; 0 without one."""
        if self._seq is None:
            return 0
        progress = self._control.progress(self._seq)
        return self._num_cached if progress is None else progress

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

    @property
    def seq(self) -> int | None:
        """Number of the current request."""
        return self._seq

    def stages_ns(self) -> list[int]:
        """When rank 0 came to each RankStage, of this request or of one before."""
        return self._control.stages_ns(0)

    def may_submit(self) -> bool:
        """Whether the next request may be handed over: request blocks are two, used in turn."""
        newest = self._control.doorbell()
        return not self.busy and (newest < 2 or self._control.all_done(newest - 1))

    def submit(self, request: DecodeRequest, *, reuse_kv: bool, scope: str = "") -> DecodeRequest:
        """Hand a request to the ranks, which are ready; the slot must be free. Returns it with the KV cache that it runs in.

        `reuse_kv`: positions that an earlier request of the same `scope` left there may count.
        """
        assert not self.busy, "the ranks decode one request at a time"
        if self._caches is None:
            self._caches = KeptCaches(self._control.kv_layout(), self._window, is_recurrent=self._is_recurrent)
        num_answer = min(request.max_tokens, self._control.max_context - len(request.prompt))
        request = request.at(self._caches.take(request.prompt, reuse=reuse_kv, scope=scope, num_answer=num_answer))
        self._seq = self._control.submit(request)
        self._next_index, self._num_cached, self._sequence = 0, request.kv.num_cached, array("I", request.prompt)
        return request

    def cancel(self) -> None:
        """Ask the ranks to end the current request early; the slot stays busy until they have."""
        if self._seq is not None:
            self._control.cancel(self._seq)

    def wait(self, timeout_s: float, interrupted: Callable[[], bool]) -> None:
        """Block until the next entry is there, at most `timeout_s`; `interrupted` is asked every 2 ms, or 5 if ranks may
        share the coordinator's core.

        The first token is looked for without sleeping when it is about to come (LOOKS_S).
        """
        seq, index, ring = self._seq, self._next_index, self._control.ring
        if seq is None:
            return
        poll_s = _POLL_S if self._control.heeds_rousing() else _POLL_OF_SHARED_CORES_S
        ring.wait(seq, index, Deadline.after(timeout_s), poll_s=poll_s, interrupted=lambda: interrupted() or self._look_s() > 0)
        if (look_s := self._look_s()) > 0:
            deadline = Deadline.after(min(timeout_s, look_s))
            wait(lambda: ring.is_begun(seq, index), aborted=interrupted, deadline=deadline, yields=sys.maxsize)

    def _look_s(self) -> float:
        """Seconds for which the first token is to be looked for from now on; 0: it does not come yet, or is late, or is there."""
        if self._next_index:
            return 0.0
        stages_ns, begin_ns = self._control.stages_ns(0), self._control.submitted_ns
        ends_ns = [stages_ns[stage] + 1e9 * look_s for stage, look_s in LOOKS_S.items() if stages_ns[stage] >= begin_ns]
        return (max(ends_ns) - time.monotonic_ns()) / 1e9 if ends_ns else 0.0

    def read(self) -> list[TokenEntry]:
        """The next entries that have come, in order, at most MAX_ENTRIES. The last entry of a request frees the slot."""
        entries: list[TokenEntry] = []
        while self._seq is not None and len(entries) < MAX_ENTRIES:
            entry = self._control.ring.get(self._seq, self._next_index)
            if entry is None:
                break
            entries.append(entry)
            self._next_index += 1
            if entry.token_id != NO_TOKEN:
                self._sequence.append(entry.token_id)
            if entry.finish is not Finish.NONE:
                self._end(entry.finish)
        return entries

    def _end(self, finish: Finish) -> None:
        assert self._caches is not None
        if finish is Finish.NUMERICAL_FAULT:
            self._caches.forget()
        else:
            self._caches.give_back(self._sequence, self.position, num_written=self.position)
            if (kept := self._caches.save()) is not None:  # while nobody waits: what comes next is queued behind it
                self._control.submit(DecodeRequest((0,), 1, kv=kept, only_copies=True))
        self._seq = None
        self._sequence = array("I")
