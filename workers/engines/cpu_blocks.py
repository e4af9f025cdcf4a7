"""The block pool of a CPU rank: keys and values of beginnings of sequences, beside the interpreter's KV caches."""

from __future__ import annotations

from math import prod

import numpy as np

from kog_dist.decode.memory import Memory
from kog_dist.decode.request import KvCopyKind, KvUse
from kog_dist.model.spec import ModelSpec

BLOCK_TOKENS = 64
MOST_SLOTS = 4096


def num_slots(spec: ModelSpec, num_lanes: int, itemsize: int, num_bytes: int) -> int:
    """Blocks of a rank with so many lanes that `num_bytes` have room for; none of a model whose state blocks do not hold."""
    if spec.is_recurrent:
        return 0
    return min(MOST_SLOTS, num_bytes // (prod(_shape(spec, num_lanes)) * itemsize))


class CpuBlocks:
    """`slots` blocks of `memory`'s type. Memory is taken at once, so that it does not grow with what is kept."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self._memory = memory
        self._blocks = np.zeros((slots, *_shape(memory.spec, len(memory.lanes))), memory.dtype)
        self._blocks.fill(0)

    def copy(self, kv: KvUse) -> None:
        """Make the copies of `kv`, in order."""
        for kind, slot, place in kv.copies:
            if kind is KvCopyKind.MOVE:
                self._blocks[place] = self._blocks[slot]
                continue
            positions = slice(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS)
            for block, layers in zip(self._blocks[slot], (self._memory.keys, self._memory.values), strict=True):
                for kept, layer in zip(block, layers, strict=True):
                    cache = layer[kv.cache][:, :, positions]
                    target = kept[:, :, : cache.shape[2]]  # the last block may reach beyond the context
                    source, to = (target, cache) if kind is KvCopyKind.LOAD else (cache, target)
                    to[...] = source


def _shape(spec: ModelSpec, num_lanes: int) -> tuple[int, ...]:
    """Keys and values; layers; lanes; heads; positions; dimensions."""
    return 2, spec.num_layers, num_lanes, spec.lane_kv_heads, BLOCK_TOKENS, spec.head_dim
