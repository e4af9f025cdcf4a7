"""The operations of a chunk of a model with one residual stream, in plain array code: what they mean, and what runs on a CPU.

The stream is float32, so that nothing in it is out of range or rounded. What is multiplied is its norm, and has the products'
type T. Sums of products are float64: no row depends on how many others a chunk has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kog_dist.errors import ConfigError
from kog_dist.workers.prefill.base.arrays import Array, float32_of, library_of, repeated
from kog_dist.workers.prefill.base.reference import attend, inverse_rms, is_finite, multiply, rotated, silu, tree_sum
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.buffers.dense import DenseBuffers, DenseRows
from kog_dist.workers.prefill.delta import plain
from kog_dist.workers.prefill.delta.state_layout import StateLayout
from kog_dist.workers.prefill.experts.plain import PlainExperts, mix

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import DenseMatrices


class DenseOperations(Protocol):
    """One rank's arithmetic, on what `DenseBuffers` and `DenseRows` hold. On a GPU operations are queued in order."""

    def begin(self, rows: DenseRows) -> None:
        """The next chunk: `place` of its rows; `next_start` = where the one after it begins."""

    def embed(self, rows: DenseRows, norm: Array) -> None:
        """stream = the tokens' embedding rows, 0 behind the prompt's last token; x = the stream's norm times `norm` (D,)."""

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """From x times the transposed `wqkv`, and biases: normed and rotated queries; keys (likewise) and values, rounded to the
        cache's type, to the plain ones and, but for padding, to the monokernel's cache. Those before the chunk that the layer
        still sees come from that cache. Nothing is stored once `overflow` is set.
        """

    def attend(self, rows: DenseRows, layer: int, sinks: Array | None = None) -> Array:
        """Outputs (L, size, heads * head_dim) of all heads; a token sees itself and what the layer's window holds before it. The
        keys and values are those of the last `append`. `sinks`: (L * heads,), one more logit of each head.
        """

    def gate_heads(self, rows: DenseRows, mixed: Array) -> None:
        """`mixed`, which `attend` gave for these rows, times the sigmoid of gates: those that `append` made, before anything else
        is multiplied.
        """

    def recur(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> Array:
        """Outputs (L, size, heads * value_dim) of a delta net: from x times the transposed `wqkv`, its convolution and its rule,
        behind the state that the monokernel keeps of the KV cache's sequence (nothing before position 0). Rows behind the
        prompt's last token change nothing. What becomes of the state stands in `DenseBuffers.states`.
        """

    def keep_states(self) -> None:
        """Behind all layers of a chunk: what `recur` made of states goes to the monokernel's; nothing once `overflow` is set."""

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Array, bias: Array | None = None) -> None:
        """own_sum (size, D) float32 = `scale` times the sum of `partial` over the hosted lanes, a binary tree of neighbours.
        `bias` (D,) is added to the first lane's.
        """

    def residual(self, rows: DenseRows, scale: float, total: Array | None, norm: Array | None, bias: Array | None = None) -> None:
        """stream += `total` (size, D) float32, or, where it is None, what `lane_sum` would give; x = its norm times `norm`, and
        with experts what rounding leaves of it.
        """

    def project(self, rows: DenseRows, mixed: Array, matrices: DenseMatrices) -> None:
        """partial = `mixed`, which `attend` gave for these rows, times the transposed `wo` of each lane."""

    def gate(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """activation = silu(gate) * up * ACTIVATION_SCALE, of gate and up = x times the transposed `w13`."""

    def lower(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """partial = activation times the transposed `w2` of each lane."""

    def mix(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """partial (L, size, D) = ACTIVATION_SCALE times what the chosen experts of each row give in each lane (docs/moe.md), in
        ascending order; 0 in rows behind the prompt's last token. Where the first lane is hosted it adds the experts' biases.
        """

    def add_shared(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """Behind `mix`: partial += what the shared expert gives in each lane, times the sigmoid of x times `shared_gate`."""

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        """`last`, of one token, gets what `rows` holds of the prompt's last one: place, stream and query; gates of heads, and
        what a delta net has mixed, if there are any.
        """

    def give_stream(self, last: DenseRows) -> None:
        """`last_streams` = that of `last`; `overflow` if a value is not finite."""


class Multiplies(Protocol):
    """What `wide_product` asks for."""

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """out (L, size, rows) = x (L, size, K) times the transposed `matrix` (L, rows, K) of each lane."""


class PlainDenseOperations:
    """`DenseOperations` in plain array code. `cache` (values of the cache's type): the monokernel's, one behind the other.
    `experts`: by layer. `states` (float32): the monokernel's, of delta nets, one sequence behind the other."""

    def __init__(
        self,
        buffers: DenseBuffers,
        embedding: Array,
        cache: Array,
        experts: Sequence[PlainExperts] = (),
        states: Array | None = None,
    ) -> None:
        self._states, self._net_layout = states, None if buffers.delta is None else StateLayout(buffers.delta)
        self.buffers, self.embedding, self._caches, self._experts = buffers, embedding, cache, experts
        self.spec, self.layout = buffers.spec, buffers.layout
        self._kept = buffers.keys[0], buffers.values[0]
        if not cache.size or cache.size % self.layout.num_values:
            raise ConfigError(f"the KV cache has {cache.size} values, its layout has {self.layout.num_values}")

    @property
    def cache(self) -> Array:
        """The KV cache that the prompt goes to."""
        return self.buffers.own_cache(self._caches)

    def begin(self, rows: DenseRows) -> None:
        """See `DenseOperations`."""
        rows.place[0] = self.buffers.next_start[0]
        rows.place[2] = rows.place[0] + rows.size
        self.buffers.next_start[0] = rows.place[2]

    def embed(self, rows: DenseRows, norm: Array) -> None:
        """See `DenseOperations`."""
        start = int(rows.place[0])
        rows.stream[...] = float32_of(self.embedding[self.buffers.prompt[start : start + rows.size]])
        rows.stream[max(0, int(self.buffers.last_position[0]) + 1 - start) :] = 0
        self._norm(rows, norm)

    def _norm(self, rows: DenseRows, norm: Array) -> None:
        normed = self._normed(rows.stream, norm)
        rows.x[...] = normed
        if rows.experts is not None:
            rows.experts.planes[1] = normed - float32_of(rows.x)

    def product(self, x: Array, matrix: Array, out: Array) -> None:
        """See `Multiplies`."""
        multiply(x, matrix, out)

    def append(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """See `DenseOperations`."""
        wide_product(self, rows.x, matrices.wqkv, rows.qkv)
        spec, lanes = self.spec, self.layout.num_lanes
        scaled = rows.qkv if matrices.qkv_bias is None else rows.qkv + matrices.qkv_bias.reshape(-1)
        heads = scaled.reshape(rows.size, lanes, -1, spec.head_dim)
        counts = (spec.lane_heads, spec.lane_heads + spec.lane_kv_heads, spec.lane_heads + 2 * spec.lane_kv_heads)
        query, key, value, _ = library_of(heads).split(heads, counts, axis=2)  # and gates
        if matrices.head_norms is not None:
            query, key = (self._normed(part, norm) for part, norm in zip((query, key), matrices.head_norms, strict=True))
        start = int(rows.place[0])
        query, key = (rotated(part.swapaxes(0, 1), self.buffers.rope, start).swapaxes(0, 1) for part in (query, key))
        rows.query.reshape(query.shape)[...] = query
        self._load(layer, start)
        for part, kept in zip(self.layout.rounded(key, value, self.cache), self._kept, strict=True):
            kept[start : start + rows.size].reshape(part.shape)[...] = float32_of(part)
        found = (rows.query, *(kept[start : start + rows.size] for kept in self._kept))
        if not all(map(is_finite, found)):
            self.buffers.overflow[...] = 1
        self._store(layer, start, min(start + rows.size, int(self.buffers.last_position[0]) + 1))

    def _normed(self, values: Array, weights: Array) -> Array:
        """Values (..., n), normed over the last dimension."""
        normed: Array = values * inverse_rms(values, self.spec.norm_eps) * weights
        return normed

    def _load(self, layer: int, end: int) -> None:
        """Keys and values before `end`, as far as they are of use."""
        first = self.layout.first_read(layer, end)
        for kept, stored in zip(self._kept, self.layout.load(self.cache, layer, first, end), strict=True):
            kept[first:end] = float32_of(stored)

    def _store(self, layer: int, first: int, end: int) -> None:
        if not int(self.buffers.overflow[0]):
            keys, values = (kept[first:end] for kept in self._kept)
            self.layout.store(self.cache, layer, first, *self.layout.rounded(keys, values, self.cache))

    def attend(self, rows: DenseRows, layer: int, sinks: Array | None = None) -> Array:
        """See `DenseOperations`."""
        return attend(self.spec, rows.query, *self._kept, int(rows.place[0]), self.spec.window(layer), sinks)

    def gate_heads(self, rows: DenseRows, mixed: Array) -> None:
        """See `DenseOperations`."""
        gates = self._gates(rows).reshape(rows.size, self.layout.num_lanes, -1).swapaxes(0, 1)
        mixed[...] = float32_of(mixed) / (1 + library_of(gates).exp(-gates))

    def _gates(self, rows: DenseRows) -> Array:
        """Those of heads (size, L, heads * head_dim), behind queries, keys and values."""
        width = self.spec.lane_heads * self.spec.head_dim
        gates: Array = rows.qkv.reshape(rows.size, self.layout.num_lanes, -1)[..., -width:]
        return gates

    def recur(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> Array:
        """See `DenseOperations`."""
        nets, mixed, layout, made = rows.nets, rows.mixed, self._net_layout, self.buffers.states
        assert nets is not None
        assert mixed is not None
        assert layout is not None
        assert made is not None
        wide_product(self, rows.x, matrices.wqkv, nets.projected)
        net, lanes, start = layout.shape.net, self.layout.num_lanes, int(rows.place[0])
        num_tokens = min(rows.size, int(self.buffers.last_position[0]) + 1 - start)
        projected = nets.projected.reshape(rows.size, lanes, -1).swapaxes(0, 1)
        state, past = layout.load(self.own_states, layout.net_of(layer), start)
        inputs = plain.inputs_of(net, projected, past, matrices, num_tokens, layout.shape.terms)
        for part, kept in zip(inputs[:3], (nets.query, nets.key, nets.value), strict=True):
            kept[: rows.size] = part.swapaxes(0, 1).reshape(rows.size, *kept.shape[1:])
        query, key, value = (
            kept[: rows.size].reshape(rows.size, lanes, -1, kept.shape[-1]).swapaxes(0, 1)
            for kept in (nets.query, nets.key, nets.value)
        )
        outputs, state = plain.advance(state, inputs._replace(query=query, key=key, value=value))
        if not all(map(is_finite, (query, key, value, state))):
            self.buffers.overflow[...] = 1
        channels = past.shape[2]
        past = library_of(past).concatenate([past, projected[:, :num_tokens, :channels]], axis=1)[:, -past.shape[1] :]
        layout.store(made, layout.net_of(layer), start + num_tokens, state, past)
        values = layout.shape.heads * net.value_dim
        gates = projected[..., channels : channels + values].reshape(outputs.shape)
        norm = matrices.delta_norm
        assert norm is not None
        mixed[...] = plain.gated(outputs, gates, norm, self.spec.norm_eps).reshape(mixed.shape)
        return mixed

    def keep_states(self) -> None:
        """See `DenseOperations`."""
        made = self.buffers.states
        assert made is not None
        if not int(self.buffers.overflow[0]):
            self.own_states[...] = made

    @property
    def own_states(self) -> Array:
        """The states of the sequence that the prompt goes on with."""
        states, made = self._states, self.buffers.states
        assert states is not None
        assert made is not None
        own: Array = states[int(self.buffers.cache_number[0]) * len(made) :][: len(made)]
        return own

    def lane_sum(self, rows: DenseRows, scale: float, own_sum: Array, bias: Array | None = None) -> None:
        """See `DenseOperations`."""
        own_sum[...] = _lanes_sum(rows.partial, bias) * scale

    def residual(self, rows: DenseRows, scale: float, total: Array | None, norm: Array | None, bias: Array | None = None) -> None:
        """See `DenseOperations`."""
        rows.stream[...] += _lanes_sum(rows.partial, bias) * scale if total is None else total
        if norm is not None:
            self._norm(rows, norm)

    def project(self, rows: DenseRows, mixed: Array, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        self.product(mixed, matrices.wo, rows.partial)

    def lower(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        w2 = matrices.w2
        assert w2 is not None
        self.product(rows.activation, w2, rows.partial)

    def gate(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        w13 = matrices.w13
        assert w13 is not None
        wide_product(self, rows.x, w13, rows.gate_up)
        by_lane = float32_of(rows.gate_up.reshape(rows.size, self.layout.num_lanes, 2, -1)).swapaxes(0, 1)
        rows.activation[...] = silu(by_lane[:, :, 0]) * by_lane[:, :, 1] * ACTIVATION_SCALE

    def mix(self, rows: DenseRows, matrices: DenseMatrices, layer: int) -> None:
        """See `DenseOperations`."""
        num_tokens = int(self.buffers.last_position[0]) + 1 - int(rows.place[0])
        mix(self.spec, rows, matrices, self._experts[layer], num_tokens, ACTIVATION_SCALE)

    def add_shared(self, rows: DenseRows, matrices: DenseMatrices) -> None:
        """See `DenseOperations`."""
        own, gate = rows.experts, matrices.shared_gate
        assert own is not None
        assert gate is not None
        self.gate(rows, matrices)
        w2 = matrices.w2  # behind what `gate` multiplies: both may be expanded in one place
        assert w2 is not None
        self.product(rows.activation, w2, own.shared)
        logits = (float32_of(rows.x) * gate).sum(-1, dtype=np.float64).astype(np.float32)
        weights = 1 / (1 + library_of(logits).exp(-logits))
        rows.partial[...] = float32_of(rows.partial) + weights[:, None] * float32_of(own.shared)

    def take_last(self, rows: DenseRows, last: DenseRows) -> None:
        """See `DenseOperations`."""
        position = int(self.buffers.last_position[0])
        row = position - int(rows.place[0])
        last.place[0], last.place[2] = position, position + 1
        last.stream[0], last.query[0], last.qkv[0] = rows.stream[row], rows.query[row], rows.qkv[row]
        if rows.mixed is not None and last.mixed is not None:
            last.mixed[:, 0] = rows.mixed[:, row]

    def give_stream(self, last: DenseRows) -> None:
        """See `DenseOperations`."""
        self.buffers.last_streams[...] = last.stream
        if not is_finite(last.stream):
            self.buffers.overflow[...] = 1


def _lanes_sum(partial: Array, bias: Array | None) -> Array:
    terms = float32_of(partial)
    return tree_sum(terms if bias is None else library_of(terms).concatenate([terms[:1] + bias, terms[1:]]))


def wide_product(do: Multiplies, x: Array, matrix: Array, out: Array) -> None:
    """out (size, L * rows) = x (size, D) times the transposed `matrix` (L, rows, D), as one product of all lanes' rows.

    A single row is multiplied lane by lane: what a library does with one may depend on how many columns there are, and a rank
    must not differ from one that hosts other lanes.
    """
    lanes, num_rows, width = matrix.shape
    if len(x) > 1:
        do.product(x[None], matrix.reshape(1, lanes * num_rows, width), out[None])
    else:
        do.product(repeated(x[None], lanes), matrix, out.reshape(lanes, 1, num_rows))
