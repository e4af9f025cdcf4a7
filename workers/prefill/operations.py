"""The operations of a chunk in plain torch: what they mean, and what runs on a CPU.

Values are stored in the products' type T and computed in float32. No row depends on how many rows of a chunk are padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec, ReduceMode
from kog_dist.workers.prefill.model.buffers import Buffers, Rows
from kog_dist.workers.prefill.model.reference import attend, tree_sum

if TYPE_CHECKING:
    from torch import Tensor

    from kog_dist.workers.prefill.model.matrices import LayerMatrices


class Operations(Protocol):
    """One rank's arithmetic. Every operation works on what `Buffers` and `Rows` hold; on a GPU they are queued in order."""

    def begin(self, rows: Rows) -> None:
        """The next chunk: `place` of its rows; `next_start` = where the one after it begins."""

    def embed(self, rows: Rows, scale: Tensor) -> None:
        """Streams of all lanes = the tokens' embedding rows, times `scale` (lanes or 1, D); `inverse_rms` of them without it.
        Rows behind the prompt's last token are 0; a GPU leaves them so in large chunks, which draws less power.

        `rows` may be `Rows.shared`, here and below, where a model has one scale for all lanes and the chunk is not exact.
        """

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """out (L, size, rows) = x (L, size, K) times the transposed `matrix` (L, rows, K) of each lane."""

    def gate(self, rows: Rows, matrix: Tensor) -> None:
        """activation = silu(gate) * up, of gate and up = 1 / rms of the stream times the stream times the transposed `matrix`."""

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        """From 1 / rms of the stream times the stream times the transposed `wqkv`: rotated queries; rotated keys and values,
        rounded to the cache's type. Or some of these.
        """

    def attend(self, rows: Rows, layer: int) -> Tensor:
        """Outputs (L, size, heads * head_dim) of all heads; a token sees itself and what the layer's window holds before it."""

    def lane_sum(self, rows: Rows, partial: Tensor, own_sum: Tensor) -> None:
        """own_sum (size, D) float32 = sum over the hosted lanes of `partial`, as a binary tree of neighbours."""

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Tensor,
        past: Tensor | None,
        total: Tensor | None,
        own_sum: Tensor | None,
        unscale: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        """h += total (blocking), p + (total - past) (delayed) or sqrt(lanes of the model) * p (local); then 1 / rms of h.

        h is `stream` times `unscale`, and `stream` becomes h times `scale`: float32 (lanes or 1, D), one of them at most.
        `after`: `rows`, or, where those are shared, the same that are not; they have to be behind a sum that is not blocking.

        `total` (size, D) float32 is a sum over the lanes of the whole model; None: that of `past` (delayed) or of `partial`
        (blocking), as `lane_sum` adds it up. `own_sum`, if given, becomes that of `partial`; never together with a `total` that
        is None.
        """

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """`last`, of one token, gets what `rows` holds of the prompt's last one: place, stream, 1 / rms and query, and of each
        pair (of `rows`, of `last`) the partial sums.
        """

    def give_streams(self, last: Rows) -> None:
        """`Buffers.last_streams` = those of `last`, whose `stream` has no scale; `overflow` if one is not finite."""

    def load_cache(self, first: int, last: int) -> None:
        """Keys and values of these positions, as far as the layers still have them, from the monokernel's cache."""

    def store_cache(self, first: int, last: int) -> None:
        """Keys and values of these positions to the monokernel's cache; nothing if `overflow` is set."""


class TorchOperations:
    """`Operations` in plain torch. `cache` (16-bit values of the cache's type) is the monokernel's."""

    def __init__(self, buffers: Buffers, embedding: Tensor, cache: Tensor) -> None:
        self.buffers, self.embedding, self.cache = buffers, embedding, cache
        self.spec, self.layout = buffers.spec, buffers.layout
        if cache.numel() != self.layout.num_values:
            raise ConfigError(f"the KV cache has {cache.numel()} values, its layout has {self.layout.num_values}")

    def begin(self, rows: Rows) -> None:
        """See `Operations`."""
        rows.place[0] = self.buffers.next_start[0]
        rows.place[2] = rows.place[0] + rows.size
        self.buffers.next_start[0] = rows.place[2]

    def embed(self, rows: Rows, scale: Tensor) -> None:
        """See `Operations`."""
        start = int(rows.place[0])
        ids = self.buffers.prompt[start : start + rows.size].long()
        values = self.embedding[ids].float()
        values[max(0, int(self.buffers.last_position) + 1 - start) :] = 0
        self._keep(rows, values.expand(len(rows.stream), -1, -1), scale)

    def _keep(self, rows: Rows, h: Tensor, scale: Tensor | None) -> None:
        kept = rows.kept_stream
        _split((h if scale is None else h * scale[:, None])[: len(kept)], kept)
        rows.inverse_rms.copy_((h.square().mean(-1) + self.spec.norm_eps).rsqrt())

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """See `Operations`."""
        out.copy_(x.float() @ matrix.float().transpose(1, 2))

    def append(self, rows: Rows, matrices: LayerMatrices, layer: int, *, queries: bool = True, others: bool = True) -> None:
        """See `Operations`."""
        import torch

        wanted = wanted_rows(self.spec, queries=queries, others=others)
        self.product(rows.stream, matrices.wqkv[:, wanted], rows.qkv[:, :, wanted])
        spec, start, lanes = self.spec, int(rows.place[0]), len(rows.stream)
        scaled = _whole(rows.qkv, rows.size) * rows.inverse_rms[..., None]
        heads = scaled.view(lanes, rows.size, -1, spec.head_dim)
        positions = torch.arange(start, start + rows.size, device=heads.device).clamp(max=spec.max_context - 1)
        cos, sin = self.buffers.rope[positions].unbind(-1)  # (size, head_dim / 2)
        even, odd = (
            heads[..., : spec.lane_heads + spec.lane_kv_heads, :].view(*heads.shape[:2], -1, spec.head_dim // 2, 2).unbind(-1)
        )
        cos, sin = cos[:, None], sin[:, None]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        query, key = turned[:, :, : spec.lane_heads], turned[:, :, spec.lane_heads :]
        value = heads[..., spec.lane_heads + spec.lane_kv_heads :, :]
        finite = True
        if queries:
            rows.query.view(rows.size, lanes, spec.lane_heads, -1).copy_(query.transpose(0, 1))
            finite = bool(rows.query.isfinite().all())
        for part, kept in ((key, self.buffers.keys), (value, self.buffers.values)) if others else ():
            target = kept[layer, start : start + rows.size].view(rows.size, lanes, spec.lane_kv_heads, -1)
            target.copy_(part.to(self.cache.dtype).transpose(0, 1))
            finite = finite and bool(target.isfinite().all())
        if not finite:
            self.buffers.overflow.fill_(1)

    def attend(self, rows: Rows, layer: int) -> Tensor:
        """See `Operations`."""
        keys, values = self.buffers.keys[layer], self.buffers.values[layer]
        return attend(self.spec, rows.query, keys, values, int(rows.place[0]), self.spec.window(layer))

    def lane_sum(self, rows: Rows, partial: Tensor, own_sum: Tensor) -> None:
        """See `Operations`."""
        own_sum.copy_(tree_sum(_whole(partial, rows.size)))

    def residual(
        self,
        rows: Rows,
        after: Rows,
        mode: ReduceMode,
        partial: Tensor,
        past: Tensor | None,
        total: Tensor | None,
        own_sum: Tensor | None,
        unscale: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        """See `Operations`."""
        added = _whole(partial, rows.size)
        if own_sum is not None:
            own_sum.copy_(tree_sum(added))
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

    def gate(self, rows: Rows, matrix: Tensor) -> None:
        """See `Operations`."""
        import torch

        self.product(rows.gated, matrix, rows.gate_up)
        gate, up = (_whole(rows.gate_up, rows.size) * rows.inverse_rms[..., None]).chunk(2, dim=-1)
        _split(torch.nn.functional.silu(gate) * up, rows.activation)

    def take_last(self, rows: Rows, last: Rows, pasts: Sequence[tuple[Tensor, Tensor]]) -> None:
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
            self.buffers.keys[layer, kept:last] = keys.to(self.buffers.dtype)
            self.buffers.values[layer, kept:last] = values.to(self.buffers.dtype)

    def store_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        if int(self.buffers.overflow):
            return
        for layer in range(self.spec.num_layers):
            keys, values = (kept[layer, first:last].to(self.cache.dtype) for kept in (self.buffers.keys, self.buffers.values))
            self.layout.store(self.cache, layer, first, keys, values)


def wanted_rows(spec: ModelSpec, *, queries: bool, others: bool) -> slice:
    """Of a lane's rows of `wqkv`: those of queries, and of keys and values."""
    of_queries = spec.lane_heads * spec.head_dim
    return slice(0 if queries else of_queries, None if others else of_queries)


def take_last(buffers: Buffers, rows: Rows, last: Rows, pasts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """See `Operations`. All on the buffers' device."""
    last.place[:1].copy_(buffers.last_position)
    last.place[2:].copy_(buffers.last_position + 1)
    row = buffers.last_position - rows.place[:1]
    for found, to in ((rows.stream, last.stream), *pasts):
        planes = found.shape[1] // rows.size
        to[:, :planes].copy_(found.view(len(found), planes, rows.size, -1).index_select(2, row)[:, :, 0])
        to[:, planes:].zero_()
    last.inverse_rms.copy_(rows.inverse_rms.index_select(1, row))
    last.query.copy_(rows.query.index_select(0, row))


def give_streams(buffers: Buffers, last: Rows) -> None:
    """See `Operations`. All on the buffers' device."""
    buffers.last_streams.copy_(_whole(last.stream, 1)[:, 0])
    buffers.overflow.masked_fill_(~buffers.last_streams.sum().isfinite(), 1)


def _whole(kept: Tensor, size: int) -> Tensor:
    """The values (L, size, n) in float32 of one plane or two."""
    values = kept[:, :size].float()
    return values if kept.shape[1] == size else values + kept[:, size:].float()


def _split(values: Tensor, to: Tensor) -> None:
    """Store values (L, size, n) in one plane, or in two: rounded, and what rounding left."""
    size = values.shape[1]
    to[:, :size] = values
    if to.shape[1] > size:
        to[:, size:] = values - to[:, :size].float()
