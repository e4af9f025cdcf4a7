"""Where the monokernel keeps keys and values (phases/attend_cache.cuh), for those who fill or read its cache from outside.

The cache is, layer by layer, [lane][kv_head][split][batch] of batches of 16 positions; lanes that share a KV head have it once.
Position p belongs to split p % splits, and is number p / splits there; a windowed layer may have room for `capacity` positions
alone, and p takes the place of p - capacity. A batch is 16 rows of K, then 8 pairs of rows of V: for every dimension the value of
the even position and that of the odd one. Caches in codes: coded_rows.py.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

import numpy as np

from kog_dist.records import dataclass
from kog_dist.workers.cuda.cache_shape import BATCH, CacheShape
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_format import CODE_BITS
from kog_dist.workers.prefill.base import coded_rows
from kog_dist.workers.prefill.base.arrays import Array, library_of, rounded


@dataclass(frozen=True)
class CacheLayout(CacheShape):
    """The cache of one rank, with the place of each value."""

    @classmethod
    def of(cls, shape: KernelShape) -> CacheLayout:
        """That of a build of the monokernel."""
        return cls(**{field.name: getattr(shape.cache, field.name) for field in fields(CacheShape)})

    @property
    def has_rings(self) -> bool:
        """Whether there are layers whose newer positions take the place of older ones."""
        return self.ring_positions > 0

    @property
    def is_coded(self) -> bool:
        """Whether it holds codes: its values are bytes then."""
        return self.kv_dtype in CODE_BITS

    @property
    def batch_values(self) -> int:
        """16-bit values of a batch; bytes of one in codes."""
        return self.batch_bytes // (1 if self.is_coded else 2)

    @property
    def heads(self) -> int:
        """KV heads of all hosted lanes, one by one, as plain arrays have them."""
        return self.num_lanes * self.spec.lane_kv_heads

    @cached_property
    def first_batches(self) -> tuple[int, ...]:
        """First batch of every layer, and the number of all at the end; delta nets have none."""
        kept = set(self.layers)
        sizes = [self.kv_heads * self.splits * self.batches(layer) * (layer in kept) for layer in range(self.spec.num_layers)]
        return tuple(np.cumsum([0, *sizes]).tolist())

    @property
    def num_values(self) -> int:
        """16-bit values of the whole cache, or bytes."""
        return self.first_batches[-1] * self.batch_values

    def batches(self, layer: int) -> int:
        """Batches of one split of a KV head."""
        return self.full_batches if self.spec.window(layer) is None else self.kept_window_batches

    def capacity(self, layer: int) -> int:
        """Positions that a layer keeps."""
        return BATCH * self.splits * self.batches(layer)

    def first_kept(self, layer: int, end: int) -> int:
        """The oldest of the positions before `end` that a layer still has."""
        return max(0, end - self.capacity(layer))

    def first_read(self, layer: int, end: int) -> int:
        """The oldest of the positions before `end` that the ones behind may need: a ring's, whatever is kept."""
        batches = self.full_batches if self.spec.window(layer) is None else self.window_batches
        return max(0, end - BATCH * self.splits * batches)

    def parts(self, cache: Array, layer: int) -> tuple[Array, Array]:
        """K (kv_heads, splits, batches, 16, head_dim) and V (kv_heads, splits, batches, 8, head_dim, 2) of a layer: views.

        `cache` has `num_values` 16-bit values.
        """
        shape = (self.kv_heads, self.splits, self.batches(layer))
        batches, width = self.batches_of(cache, layer), self.spec.head_dim
        keys = batches.reshape(*shape, 2, BATCH, width)[..., 0, :, :]
        return keys, batches.reshape(*shape, 2, BATCH // 2, width, 2)[..., 1, :, :, :]

    def batches_of(self, cache: Array, layer: int) -> Array:
        """All of a layer (kv_heads, splits, batches, values of a batch): a view."""
        first, last = (batch * self.batch_values for batch in self.first_batches[layer : layer + 2])
        return cache[first:last].reshape(self.kv_heads, self.splits, self.batches(layer), self.batch_values)

    def store(self, cache: Array, layer: int, first: int, keys: Array, values: Array) -> None:
        """Write the positions from `first` on; keys and values (positions, heads, head_dim) have the type of `cache`.

        In codes: of any type; they are rounded here.
        """
        kept = max(first, self.first_kept(layer, first + len(keys)))
        keys, values = (rows[kept - first :, :: self.sharing_lanes] for rows in (keys, values))
        places = split, batch, row = self._places(layer, kept, len(keys), cache)
        if self.is_coded:
            coded_rows.coded_parts(self.batches_of(cache, layer), self.spec.head_dim, self.kv_dtype).store(places, (keys, values))
            return
        k, v = self.parts(cache, layer)
        k[:, split, batch, row] = keys.swapaxes(0, 1)
        v[:, split, batch, row // 2, :, row % 2] = values

    def load(self, cache: Array, layer: int, first: int, last: int) -> tuple[Array, Array]:
        """Keys and values (positions, heads, head_dim) of the positions `first` to `last` - 1, which it must still have.

        In codes: as float32.
        """
        places = split, batch, row = self._places(layer, first, last - first, cache)
        if self.is_coded:
            coded = coded_rows.coded_parts(self.batches_of(cache, layer), self.spec.head_dim, self.kv_dtype)
            keys, values = coded.load(places)
        else:
            k, v = self.parts(cache, layer)
            keys, values = k[:, split, batch, row].swapaxes(0, 1), v[:, split, batch, row // 2, :, row % 2]
        return keys.repeat(self.sharing_lanes, 1), values.repeat(self.sharing_lanes, 1)

    def rounded(self, keys: Array, values: Array, cache: Array) -> tuple[Array, Array]:
        """What the cache keeps of keys and values (..., head_dim)."""
        if self.is_coded:
            return coded_rows.rounded_rows(keys, values, self.kv_dtype)
        return rounded(keys, cache.dtype), rounded(values, cache.dtype)

    def _places(self, layer: int, first: int, count: int, like: Array) -> coded_rows.Places:
        positions = library_of(like).arange(first, first + count)
        slot = positions // self.splits % (BATCH * self.batches(layer))
        return positions % self.splits, slot // BATCH, slot % BATCH
