"""The KV caches of a GPU rank: what requests begin behind, and the copies between caches and the block pool."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse
from kog_dist.runtime.control import KvLayout
from kog_dist.runtime.notes import note
from kog_dist.workers.cuda import kv_blocks
from kog_dist.workers.engines.cuda_rank import CudaRank
from kog_dist.workers.engines.cuda_request import CudaRequest
from kog_dist.workers.engines.cuda_states import CudaStates, anew
from kog_dist.workers.prefill.base.delta_blocks import BLOCK

if TYPE_CHECKING:
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel


class CudaCaches:
    """What is queued here is done before whatever is queued behind it.

    `states`: None for a model without a state that every token changes.
    """

    def __init__(self, gpu: CudaRank) -> None:
        self._gpu = gpu
        self._blocks: kv_blocks.KvBlocks | None = None
        self.states: CudaStates | None = None
        self._cleared = dict[int, int]()  # by KV cache that a fault has emptied: the newest request that may want to copy from it

    def make(self, shape: KernelShape, kernel: Monokernel, most_drafted: int) -> None:
        """The pool, if there is memory for one, and the model can have one; said in the control page. And the books of states.

        `most_drafted`: tokens of a pass. Drafts that were wrong are in the way of as many of the oldest positions.
        """
        args = self._gpu.args
        num_tokens = kv_blocks.block_tokens(shape)
        slots, states = kv_blocks.pool_slots(shape, args.kept_bytes)
        host_slots, host_states = kv_blocks.pool_slots(shape, args.kept_host_bytes)
        layout = KvLayout(args.num_kv_caches, max(shape.cache.ring_positions - most_drafted, 0))
        if shape.delta is not None:
            self.states = CudaStates(args.num_kv_caches)
            layout = replace(layout, state_stride=1 if self._gpu.prefill is None else BLOCK)
        if slots:
            nets_ptr = 0 if kernel.nets is None else int(kernel.nets.data.ptr)
            self._blocks = kv_blocks.KvBlocks(
                shape, kernel.kv.data.ptr, slots, host_slots, nets_ptr=nets_ptr, states=states, host_states=host_states
            )
            layout = replace(layout, block_tokens=num_tokens, num_slots=slots, num_host_slots=host_slots)
            layout = replace(layout, num_states=states, num_host_states=host_states)
        self._gpu.control.set_kv_layout(self._gpu.rank, layout)

    def copy(self, kv: KvUse) -> None:
        """Queue the copies of `kv` between its cache and the pool."""
        assert self._blocks is not None, "the coordinator knows whether there is a pool"
        if self.states is not None:
            kv = replace(kv, copies=self.states.saved(kv))
        self._blocks.copy(kv, self._gpu.kernel.stream.ptr)

    def begin(self, seq: int, kv: KvUse) -> tuple[int, deque[KvCopy]]:
        """Queue what a request's cache gets of its beginning: how many positions it goes on behind, and which copies of its state
        are still to be made, by their places.
        """
        gpu = self._gpu
        is_gone = kv.source != kv.cache and seq <= self._cleared.get(kv.source, 0)  # what it was to copy
        if self.states is not None:
            kv = self._with_state(self.states, seq, kv, is_gone=is_gone)
        elif is_gone:
            kv = anew(kv)
        saves = deque(copy for copy in kv.copies if copy.kind is KvCopyKind.SAVE_STATE)
        if fetched := tuple(copy for copy in kv.copies if copy.kind is not KvCopyKind.SAVE_STATE):
            self._fetch(replace(kv, copies=fetched))
        if kv.source != kv.cache and kv.num_cached:
            gpu.kernel.copy_beginning(kv.source, kv.cache, kv.num_cached)
            if gpu.prefill is not None:
                gpu.prefill.forget(0, kv.cache)
        while saves and saves[0].place <= kv.num_cached:
            self.copy(replace(kv, copies=(saves.popleft(),)))
        return kv.num_cached, saves

    def _with_state(self, states: CudaStates, seq: int, kv: KvUse, *, is_gone: bool) -> KvUse:
        """What it goes on behind, with a state there. The state of its cache stands where the copy of another one is queued."""
        missed, use = states.num_missed, states.use(kv, is_gone=is_gone)
        if states.num_missed > missed:
            note(f"request {seq} begins anew: the state behind its first {kv.num_cached} tokens is not there any more")
        if states.moves_with(use):
            self._gpu.kernel.copy_state(use.source, use.cache)
        return use

    def _fetch(self, kv: KvUse) -> None:
        """Queue what the pool has of a prompt."""
        self.copy(kv)
        assert self._blocks is not None
        first, prefill = next((copy.place for copy in kv.copies if copy.kind is KvCopyKind.LOAD), None), self._gpu.prefill
        if prefill is not None and first is not None:
            prefill.forget(first * kv_blocks.block_tokens(self._blocks.shape), kv.cache)

    def goes(self, cache: int) -> None:
        """Launches begin there, or prefill: nobody knows how far its state is."""
        if self.states is not None:
            self.states.goes(cache)

    def save_state(self, one: CudaRequest, position: int | None = None) -> None:
        """Queue the copy of a request's state that is due behind so many positions, before anybody else is told to use it. None:
        where its launches have left it; a request that has ended elsewhere makes no more copies.
        """
        assert self.states is not None
        at = int(self._gpu.kernel.state()["position"]) if position is None else position
        if one.saves and one.saves[0].place == at:
            self.states.stands(one.cache, at)
            self.copy(KvUse(one.cache, one.cache, at, (one.saves.popleft(),)))
            self.states.goes(one.cache)
        elif position is None:
            one.saves.clear()

    def end(self, one: CudaRequest, held: int) -> None:
        """A request has ended, and its cache holds so many positions; after a fault none."""
        if self.states is not None:
            self.save_state(one, held)
            self.states.stands(one.cache, held)

    def clear(self, cache: int) -> None:
        """A fault has emptied it: none of the requests that have come by now can copy from it. Collective."""
        self._cleared[cache] = self._gpu.shared(self._gpu.control.doorbell())

    def close(self) -> None:
        """Let the pool go."""
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
