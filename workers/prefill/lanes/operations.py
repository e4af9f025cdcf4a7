"""The operations of a chunk in plain array code: what they mean, and what runs on a CPU.

Values are stored in the products' type T and computed in float32, sums of products in float64. So no row depends on how many
others a chunk has, nor a lane on how many a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec, ReduceMode
from kog_dist.workers.prefill.base.arrays import Array, float32_of, library_of, rounded
from kog_dist.workers.prefill.base.reference import attend, inverse_rms, is_finite, multiply, rotated, silu, tree_sum
from kog_dist.workers.prefill.buffers.lanes import Buffers, Rows

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import LayerMatrices


class Operations(Protocol):
    """One rank's arithmetic. Every operation works on what `Buffers` and `Rows` hold; on a GPU they are queued in order."""

    def begin(self, rows: Rows) -> None:
        """The next chunk: `place` of its rows; `next_start` = where the one after it begins."""

    def embed(self, rows: Rows, scale: Array) -> None:
        """Streams of all lanes = the tokens' embedding rows, times `scale` (lanes or 1, D); `inverse_rms` of them without it.
        Rows behind the prompt's last token are 0; a GPU leaves them so in large chunks, which draws less power.

        `rows` may be `Rows.shared`, here and below, where a model has one scale for all lanes and the chunk is not exact.
        """

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """out (L, size, rows) = x (L, size, K) times the transposed `matrix` (L, rows, K) of each lane."""

    def gate(self, rows: Rows, matrix: Array) -> None:
        """activation = silu(gate) * up, of gate and up = 1 / rms of the stream times the stream times the transposed `matrix`."""

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        """From 1 / rms of the stream times the stream times the transposed `wqkv`: rotated queries; rotated keys and values,
        rounded to the cache's type. Or some of these.
        """

    def attend(self, rows: Rows, layer: int) -> Array:
        """Outputs (L, size, heads * head_dim) of all heads; a token sees itself and what the layer's window holds before it."""

    def lane_sum(self, rows: Rows, partial: Array, own_sum: Array) -> None:
        """own_sum (size, D) float32 = sum over the hosted lanes of `partial`, as a binary tree of neighbours."""

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Array,
        past: Array | None,
        total: Array | None,
        own_sum: Array | None,
        unscale: Array | None,
        scale: Array | None,
    ) -> None:
        """h += total (blocking), p + (total - past) (delayed) or sqrt(lanes of the model) * p (local); then 1 / rms of h.

        h is `stream` times `unscale`, and `stream` becomes h times `scale`: float32 (lanes or 1, D), one of them at most.
        `after`: `rows`, or, where those are shared, the same that are not; they have to be behind a sum that is not blocking.

        `total` (size, D) float32 is a sum over the lanes of the whole model; None: that of `past` (delayed) or of `partial`
        (blocking), as `lane_sum` adds it up. `own_sum`, if given, becomes that of `partial`; never together with a `total` that
        is None.
        """

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Array, Array]]) -> None:
        """`last`, of one token, gets what `rows` holds of the prompt's last one: place, stream, 1 / rms and query, and of each
        pair (of `rows`, of `last`) the partial sums.
        """

    def give_streams(self, last: Rows) -> None:
        """`Buffers.last_streams` = those of `last`, whose `stream` has no scale; `overflow` if one is not finite."""

    def load_cache(self, first: int, last: int) -> None:
        """Keys and values of these positions, as far as the layers still have them, from the monokernel's cache."""

    def store_cache(self, first: int, last: int) -> None:
        """Keys and values of these positions to the monokernel's cache; nothing if `overflow` is set."""


class PlainOperations:
    """`Operations` in plain array code. `cache` (values of the cache's type): the monokernel's, one behind the other."""

    def __init__(self, buffers: Buffers, embedding: Array, cache: Array) -> None:
        self.buffers, self.embedding, self._caches = buffers, embedding, cache
        self.spec, self.layout = buffers.spec, buffers.layout
        if not cache.size or cache.size % self.layout.num_values:
            raise ConfigError(f"the KV cache has {cache.size} values, its layout has {self.layout.num_values}")

    @property
    def cache(self) -> Array:
        """The KV cache that the prompt goes to."""
        return self.buffers.own_cache(self._caches)

    def begin(self, rows: Rows) -> None:
        """See `Operations`."""
        rows.place[0] = self.buffers.next_start[0]
        rows.place[2] = rows.place[0] + rows.size
        self.buffers.next_start[0] = rows.place[2]

    def embed(self, rows: Rows, scale: Array) -> None:
        """See `Operations`."""
        start = int(rows.place[0])
        values = float32_of(self.embedding[self.buffers.prompt[start : start + rows.size]])
        values[max(0, int(self.buffers.last_position[0]) + 1 - start) :] = 0
        self._keep(rows, library_of(values).broadcast_to(values, (len(rows.stream), *values.shape)), scale)

    def _keep(self, rows: Rows, h: Array, scale: Array | None) -> None:
        kept = rows.kept_stream
        _split((h if scale is None else h * scale[:, None])[: len(kept)], kept)
        rows.inverse_rms[...] = inverse_rms(h, self.spec.norm_eps)[..., 0]

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """See `Operations`."""
        multiply(x, matrix, out)

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        """See `Operations`."""
        wanted = wanted_rows(self.spec, queries=queries, others=others)
        self.product(rows.stream, matrices.wqkv[:, wanted], rows.qkv[:, :, wanted])
        spec, start, lanes = self.spec, int(rows.place[0]), len(rows.stream)
        scaled = _whole(rows.qkv, rows.size) * rows.inverse_rms[..., None]
        heads = scaled.reshape(lanes, rows.size, -1, spec.head_dim)
        turned = rotated(heads[:, :, : spec.lane_heads + spec.lane_kv_heads], self.buffers.rope, start)
        query, key = turned[:, :, : spec.lane_heads], turned[:, :, spec.lane_heads :]
        value = heads[..., spec.lane_heads + spec.lane_kv_heads :, :]
        finite = True
        if queries:
            rows.query.reshape(rows.size, lanes, spec.lane_heads, -1)[...] = query.swapaxes(0, 1)
            finite = is_finite(rows.query)
        for part, kept in ((key, self.buffers.keys), (value, self.buffers.values)) if others else ():
            target = kept[layer, start : start + rows.size].reshape(rows.size, lanes, spec.lane_kv_heads, -1)
            target[...] = float32_of(rounded(part, self.cache.dtype)).swapaxes(0, 1)
            finite = finite and is_finite(target)
        if not finite:
            self.buffers.overflow[...] = 1

    def attend(self, rows: Rows, layer: int) -> Array:
        """See `Operations`."""
        keys, values = self.buffers.keys[layer], self.buffers.values[layer]
        return attend(self.spec, rows.query, keys, values, int(rows.place[0]), self.spec.window(layer))

    def lane_sum(self, rows: Rows, partial: Array, own_sum: Array) -> None:
        """See `Operations`."""
        own_sum[...] = tree_sum(_whole(partial, rows.size))

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Array,
        past: Array | None,
        total: Array | None,
        own_sum: Array | None,
        unscale: Array | None,
        scale: Array | None,
    ) -> None:
        """See `Operations`."""
        added = _whole(partial, rows.size)
        if own_sum is not None:
            own_sum[...] = tree_sum(added)
        if mode is ReduceMode.BLOCKING:
            added = tree_sum(added) if total is None else total
        elif mode is ReduceMode.DELAYED:
            assert past is not None
            before = _whole(past, rows.size)
            added = added + ((tree_sum(before) if total is None else total) - before)
        else:
            added = added * math.sqrt(self.spec.num_lanes)
        h = _whole(rows.stream, rows.size)
        if unscale is not None:
            h = h * unscale[:, None]
        self._keep(after, h + added, scale)

    def gate(self, rows: Rows, matrix: Array) -> None:
        """See `Operations`."""
        self.product(rows.gated, matrix, rows.gate_up)
        scaled, half = _whole(rows.gate_up, rows.size) * rows.inverse_rms[..., None], self.spec.lane_ffn
        _split(silu(scaled[..., :half]) * scaled[..., half:], rows.activation)

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Array, Array]]) -> None:
        """See `Operations`."""
        take_last(self.buffers, rows, last, pasts)

    def give_streams(self, last: Rows) -> None:
        """See `Operations`."""
        give_streams(self.buffers, last)

    def load_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        for layer in range(self.spec.num_layers):
            kept = max(first, self.layout.first_kept(layer, last))
            keys, values = self.layout.load(self.cache, layer, kept, last)
            self.buffers.keys[layer, kept:last] = float32_of(keys)
            self.buffers.values[layer, kept:last] = float32_of(values)

    def store_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        if int(self.buffers.overflow[0]):
            return
        for layer in range(self.spec.num_layers):
            keys, values = (
                rounded(kept[layer, first:last], self.cache.dtype) for kept in (self.buffers.keys, self.buffers.values)
            )
            self.layout.store(self.cache, layer, first, keys, values)


def wanted_rows(spec: ModelSpec, *, queries: bool, others: bool) -> slice:
    """Of a lane's rows of `wqkv`: those of queries, and of keys and values."""
    of_queries = spec.lane_heads * spec.head_dim
    return slice(0 if queries else of_queries, None if others else of_queries)


def take_last(buffers: Buffers, rows: Rows, last: Rows, pasts: Sequence[tuple[Array, Array]]) -> None:
    """See `Operations`."""
    position = int(buffers.last_position[0])
    last.place[0], last.place[2] = position, position + 1
    row = position - int(rows.place[0])
    for found, to in ((rows.stream, last.stream), *pasts):
        planes = found.shape[1] // rows.size
        to[:, :planes] = found.reshape(len(found), planes, rows.size, -1)[:, :, row]
        to[:, planes:] = 0
    last.inverse_rms[:, 0] = rows.inverse_rms[:, row]
    last.query[0] = rows.query[row]


def give_streams(buffers: Buffers, last: Rows) -> None:
    """See `Operations`."""
    buffers.last_streams[...] = _whole(last.stream, 1)[:, 0]
    if not is_finite(buffers.last_streams):
        buffers.overflow[...] = 1


def _whole(kept: Array, size: int) -> Array:
    """The values (L, size, n) in float32 of one plane or two."""
    values = float32_of(kept[:, :size])
    return values if kept.shape[1] == size else values + float32_of(kept[:, size:])


def _split(values: Array, to: Array) -> None:
    """Store values (L, size, n) in one plane, or in two: rounded, and what rounding left."""
    size = values.shape[1]
    to[:, :size] = values
    if to.shape[1] > size:
        to[:, size:] = values - float32_of(to[:, :size])
