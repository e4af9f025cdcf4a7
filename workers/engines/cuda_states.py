"""The books of a GPU rank's states, of a model whose every token changes one: behind how many positions each of them stands.

The kernel has a state with each KV cache (`Monokernel.nets`), and the pool has copies (kv_blocks.py). A request goes on behind a
state that stands where its prompt is kept, or it begins anew: never behind any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kog_dist.decode.request import KvCopy, KvCopyKind, KvUse

_MOVING = -1  # the request in the cache has launches: nobody knows how far they are


class CudaStates:
    """Those of `num_caches` KV caches and of the pool's slots. All ranks are told the same, so their books are alike."""

    def __init__(self, num_caches: int) -> None:
        self._behind = [0] * num_caches
        self._kept: dict[int, int] = {}  # by slot of the pool
        self.num_missed = 0  # requests whose state was not where the coordinator takes it to be

    def use(self, kv: KvUse, *, is_gone: bool) -> KvUse:
        """What a request can have of what it is told to go on behind: all of it, or nothing but the copies that it is to make.

        `is_gone`: its keys and values. Its cache's state counts as one behind `num_cached` from now on.
        """
        load = next((copy for copy in kv.copies if copy.kind is KvCopyKind.LOAD_STATE), None)
        stands_at = self._behind[kv.source] if load is None else self._kept.get(load.slot)
        if kv.num_cached and (is_gone or stands_at != kv.num_cached):
            self.num_missed += not is_gone
            kv = anew(kv)
            self._doubt(kv.copies)  # the coordinator takes those up to `num_cached` for made
        self._behind[kv.cache] = kv.num_cached
        return kv

    def moves_with(self, kv: KvUse) -> bool:
        """Whether the state of another cache is to be copied with its keys and values."""
        loads = any(copy.kind is KvCopyKind.LOAD_STATE for copy in kv.copies)
        return kv.source != kv.cache and kv.num_cached > 0 and not loads

    def goes(self, cache: int) -> None:
        """Launches begin there."""
        self._behind[cache] = _MOVING

    def stands(self, cache: int, position: int) -> None:
        """All launches have ended, and the state is behind so many positions; 0 also where it is of no use any more."""
        self._behind[cache] = position

    def saved(self, kv: KvUse) -> tuple[KvCopy, ...]:
        """Those of a cache's copies that can be made now; not of a state that stands elsewhere, or is not there."""
        return tuple(copy for copy in kv.copies if self._is_made(copy, self._behind[kv.cache]))

    def _is_made(self, copy: KvCopy, behind: int) -> bool:
        """Whether a copy can be made now, which is written down; the state of its cache is `behind` so many positions."""
        if copy.kind is KvCopyKind.SAVE_STATE:
            to, position = copy.slot, copy.place if copy.place == behind else None
        elif copy.kind is KvCopyKind.MOVE_STATE:
            to, position = copy.place, self._kept.pop(copy.slot, None)
        else:
            return True
        self._kept.pop(to, None)
        if position is not None:
            self._kept[to] = position
        return position is not None

    def _doubt(self, copies: Iterable[KvCopy]) -> None:
        """Nobody goes on behind what stands in the slots that these are to be saved to."""
        for copy in copies:
            if copy.kind is KvCopyKind.SAVE_STATE:
                self._kept.pop(copy.slot, None)


def anew(kv: KvUse) -> KvUse:
    """The same for a request that can go on behind nothing: only the copies of its state that it is to make stay."""
    saves = tuple(copy for copy in kv.copies if copy.kind is KvCopyKind.SAVE_STATE)
    return replace(kv, source=kv.cache, num_cached=0, copies=saves)
