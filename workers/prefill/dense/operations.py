"""The operations of a chunk of a model with one residual stream, in plain torch: what they mean, and what runs on a CPU.

The stream is float32, so that nothing in it is out of range or rounded. What is multiplied is its norm, and has the products'
type T. No row depends on how many rows of a chunk are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kog_dist.errors import ConfigError
from kog_dist.workers.prefill.dense.buffers import DenseBuffers, DenseRows
from kog_dist.workers.prefill.model.reference import attend, tree_sum

if TYPE_CHECKING:
    from torch import Tensor

    from kog_dist.workers.prefill.model.matrices import DenseMatrices

# Activations are kept times this, and what comes of them is multiplied by its inverse. The largest ones of published models reach
# some thousands, their sums over a lane more; binary16 ends at 65,504, so here it ends at 4 million. What becomes smaller than
# its smallest normal value is rounded to 2**-25, four millionths of an activation of 1/2.
ACTIVATION_SCALE = 2.0**-6


class DenseOperations(Protocol):
    """One rank's arithmetic, on what `DenseBuffers` and `DenseRows` hold. On a GPU operations are queued in order."""

    def begin(self, rows: DenseRows) -> None:
        """The next chunk: `place` of its rows; `next_start` = where the one after it begins."""

    def embed(self, rows: DenseRows, norm: Tensor) -> None:
        """stream = the tokens' embedding rows, 0 behind the prompt's last token; x = the stream's norm times `norm` (D,)."""

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """out (L, size, rows) = x (L, size, K) times the transposed `matrix` (L, rows, K) of each lane."""

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """From x times the transposed `wqkv`, and biases: normed and rotated queries; keys (likewise) and values, rounded to the
        cache's type, to the plain ones and, but for padding, to the monokernel's cache. Those before the chunk that the layer
        still sees come from that cache. Nothing is stored once `overflow` is set.
        """

    def attend(self, rows: DenseRows, layer: int) -> Tensor:
        """Outputs (L, size, heads * head_dim) of all heads; a token sees itself and what the layer's window holds before it. The
        keys and values are those of the last `append`.
        """

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Tensor) -> None:
        """own_sum (size, D) float32 = `scale` times the sum of `partial` over the hosted lanes, a binary tree of neighbours."""

    def residual(self, rows: DenseRows, scale: float, total: Tensor | None, norm: Tensor | None) -> None:
        """stream += `total` (size, D) float32, or, where it is None, what `lane_sum` would give; x = its norm times `norm`."""

    def gate(self, rows: DenseRows, matrix: Tensor) -> None:
        """activation = silu(gate) * up * ACTIVATION_SCALE, of gate and up = x times the transposed `matrix`."""

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        """`last`, of one token, gets what `rows` holds of the prompt's last one: place, stream and query."""

    def give_stream(self, last: DenseRows) -> None:
        """`last_streams` = that of `last`; `overflow` if a value is not finite."""


class TorchDenseOperations:
    """`DenseOperations` in plain torch. `cache` (16-bit values of the cache's type) is the monokernel's."""

    def __init__(self, buffers: DenseBuffers, embedding: Tensor, cache: Tensor) -> None:
        self.buffers, self.embedding, self.cache = buffers, embedding, cache
        self.spec, self.layout = buffers.spec, buffers.layout
        self._kept = buffers.keys[0], buffers.values[0]
        if cache.numel() != self.layout.num_values:
            raise ConfigError(f"the KV cache has {cache.numel()} values, its layout has {self.layout.num_values}")

    def begin(self, rows: DenseRows) -> None:
        """See `DenseOperations`."""
        rows.place[0] = self.buffers.next_start[0]
        rows.place[2] = rows.place[0] + rows.size
        self.buffers.next_start[0] = rows.place[2]

    def embed(self, rows: DenseRows, norm: Tensor) -> None:
        """See `DenseOperations`."""
        start = int(rows.place[0])
        rows.stream.copy_(self.embedding[self.buffers.prompt[start : start + rows.size].long()].float())
        rows.stream[max(0, int(self.buffers.last_position) + 1 - start) :] = 0
        self._norm(rows, norm)

    def _norm(self, rows: DenseRows, norm: Tensor) -> None:
        inverse_rms = (rows.stream.square().mean(-1, keepdim=True) + self.spec.norm_eps).rsqrt()
        rows.x.copy_(rows.stream * inverse_rms * norm)

    def product(self, x: Tensor, matrix: Tensor, out: Tensor) -> None:
        """See `DenseOperations`."""
        out.copy_(x.float() @ matrix.float().transpose(1, 2))

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """See `DenseOperations`."""
        import torch

        wide_product(self, rows.x, matrices.wqkv, rows.qkv)
        spec, lanes = self.spec, self.layout.num_lanes
        scaled = rows.qkv if matrices.qkv_bias is None else rows.qkv + matrices.qkv_bias.flatten()
        heads = scaled.view(rows.size, lanes, -1, spec.head_dim)
        counts = [spec.lane_heads, spec.lane_kv_heads, spec.lane_kv_heads]
        query, key, value = torch.split(heads, counts, dim=2)
        if matrices.head_norms is not None:
            query, key = (self._normed(part, norm) for part, norm in zip((query, key), matrices.head_norms, strict=True))
        start = int(rows.place[0])
        query, key = self._rotated(query, start), self._rotated(key, start)
        rows.query.view(rows.size, lanes, spec.lane_heads, -1).copy_(query)
        self._load(layer, start)
        for part, kept in zip(self.layout.rounded(key, value, self.cache), self._kept, strict=True):
            kept[start : start + rows.size].view(part.shape).copy_(part)
        found = (rows.query, *(kept[start : start + rows.size] for kept in self._kept))
        if not all(bool(part.isfinite().all()) for part in found):
            self.buffers.overflow.fill_(1)
        self._store(layer, start, min(start + rows.size, int(self.buffers.last_position) + 1))

    def _normed(self, heads: Tensor, weights: Tensor) -> Tensor:
        return heads * (heads.square().mean(-1, keepdim=True) + self.spec.norm_eps).rsqrt() * weights

    def _rotated(self, heads: Tensor, start: int) -> Tensor:
        """Heads (size, L, heads, head_dim) of the positions from `start` on."""
        import torch

        positions = torch.arange(start, start + len(heads), device=heads.device).clamp(max=self.spec.max_context - 1)
        cos, sin = self.buffers.rope[positions][:, None, None].unbind(-1)  # (size, 1, 1, head_dim / 2)
        even, odd = heads[..., 0::2], heads[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)

    def _load(self, layer: int, end: int) -> None:
        """Keys and values before `end`, as far as the layer still has them."""
        first = self.layout.first_kept(layer, end)
        for kept, stored in zip(self._kept, self.layout.load(self.cache, layer, first, end), strict=True):
            kept[first:end] = stored.to(kept.dtype)

    def _store(self, layer: int, first: int, end: int) -> None:
        if not int(self.buffers.overflow):
            keys, values = (kept[first:end] for kept in self._kept)
            self.layout.store(self.cache, layer, first, *self.layout.rounded(keys, values, self.cache))

    def attend(self, rows: DenseRows, layer: int) -> Tensor:
        """See `DenseOperations`."""
        return attend(self.spec, rows.query, *self._kept, int(rows.place[0]), self.spec.window(layer))

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Tensor) -> None:
        """See `DenseOperations`."""
        own_sum.copy_(tree_sum(rows.partial) * scale)

    def residual(self, rows: DenseRows, scale: float, total: Tensor | None, norm: Tensor | None) -> None:
        """See `DenseOperations`."""
        rows.stream.add_(tree_sum(rows.partial) * scale if total is None else total)
        if norm is not None:
            self._norm(rows, norm)

    def gate(self, rows: DenseRows, matrix: Tensor) -> None:
        """See `DenseOperations`."""
        import torch

        wide_product(self, rows.x, matrix, rows.gate_up)
        gate, up = rows.gate_up.view(rows.size, self.layout.num_lanes, 2, -1).transpose(0, 1).float().unbind(2)
        rows.activation.copy_(torch.nn.functional.silu(gate) * up * ACTIVATION_SCALE)

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        """See `DenseOperations`."""
        row = self.buffers.last_position - rows.place[:1]
        last.place[:1].copy_(self.buffers.last_position)
        last.place[2:].copy_(self.buffers.last_position + 1)
        last.stream.copy_(rows.stream.index_select(0, row))
        last.query.copy_(rows.query.index_select(0, row))

    def give_stream(self, last: DenseRows) -> None:
        """See `DenseOperations`."""
        self.buffers.last_streams.copy_(last.stream)
        self.buffers.overflow.masked_fill_(~last.stream.sum().isfinite(), 1)


def wide_product(do: DenseOperations, x: Tensor, matrix: Tensor, out: Tensor) -> None:
    """out (size, L * rows) = x (size, D) times the transposed `matrix` (L, rows, D), as one product of all lanes' rows.

    A single row is multiplied lane by lane: what a library does with one may depend on how many columns there are, and a rank
    must not differ from one that hosts other lanes.
    """
    lanes, num_rows, width = matrix.shape
    if len(x) > 1:
        do.product(x[None], matrix.view(1, lanes * num_rows, width), out[None])
    else:
        do.product(x.expand(lanes, 1, width), matrix, out.view(lanes, 1, num_rows))
