"""The pool of a CPU rank: keys and values of beginnings of sequences, and copies of states, beside the interpreter's own."""

from __future__ import annotations

import numpy as np

from kog_dist.decode.cpu.memory import Memory
from kog_dist.decode.cpu.pool_sizes import BLOCK_TOKENS, block_shape
from kog_dist.decode.request import KvCopyKind, KvUse


class CpuBlocks:
    """`slots` blocks of `memory`'s type, and `states` copies of a state. Memory is taken at once: it does not grow with use."""

    def __init__(self, memory: Memory, slots: int, states: int = 0) -> None:
        self._memory = memory
        self._blocks = np.zeros((slots, *block_shape(memory.spec, len(memory.lanes), BLOCK_TOKENS)), memory.dtype)
        self._states = [[np.zeros((states, *array.shape), array.dtype) for array in layer[0]] for layer in memory.states]
        for taken in (self._blocks, *(array for layer in self._states for array in layer)):
            taken.fill(0)

    def copy(self, kv: KvUse) -> None:
        """Make the copies of `kv`, in order."""
        for kind, slot, place in kv.copies:
            if kind is KvCopyKind.MOVE:
                self._blocks[place] = self._blocks[slot]
            elif kind in (KvCopyKind.LOAD_STATE, KvCopyKind.SAVE_STATE):
                self._copy_state(slot, kv.cache, saves=kind is KvCopyKind.SAVE_STATE)
            else:
                self._copy_block(slot, kv.cache, place, saves=kind is KvCopyKind.SAVE)

    def _copy_block(self, slot: int, cache: int, place: int, *, saves: bool) -> None:
        positions = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
        for block, layers in zip(self._blocks[slot], (self._memory.keys, self._memory.values), strict=True):
            for kept, layer in zip(block, (layer for layer in layers if layer[cache].size), strict=True):
                of_cache = layer[cache][:, :, positions]
                of_block = kept[:, :, : of_cache.shape[2]]  # the last block may reach beyond the context
                source, target = (of_cache, of_block) if saves else (of_block, of_cache)
                target[...] = source

    def _copy_state(self, slot: int, cache: int, *, saves: bool) -> None:
        for kept, layer in zip(self._states, self._memory.states, strict=True):
            for of_slots, array in zip(kept, layer[cache], strict=True):
                source, target = (array, of_slots[slot]) if saves else (of_slots[slot], array)
                target[...] = source
