"""The calls of delta nets: what they project, their convolution, and the state that every token changes, one after the other.

A token's step is the same whatever pass it is in: the rule is never computed in blocks of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kog_dist.decode import lane_math
from kog_dist.decode.cursor import Cursor
from kog_dist.decode.exchange_calls import ExchangeCalls
from kog_dist.decode.groups import Array, Finder, Group
from kog_dist.decode.steps import Kind, Phase
from kog_dist.model.layers import DeltaNet
from kog_dist.model.weights import LayerWeights, RankWeights

Run = Callable[[], None]
_NORM_EPS = 1e-6  # under the root of the norms of queries and keys


class DeltaCalls:
    """Makes the calls of layers with a delta net, as `LaneCalls` does."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.memory, self.weights, self.cursor = find, find.memory, weights, cursor
        self.spec, self.num_tokens = cursor.plan.spec, find.num_tokens
        self.inverse = self.memory.empty(self.num_tokens, 1)
        self.normed = self.memory.empty(self.num_tokens, self.spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.DELTA_IN: self._project, Phase.DELTA: self._delta, Phase.OUT: self._out,
        }  # fmt: skip

    def _layers(self, group: Group) -> list[LayerWeights]:
        """Weights of the group's layer, of each of its lanes."""
        return [self.weights.lanes[step.lane].layers[step.layer] for step in group.steps]

    def _products(self, matrices: Sequence[Array], vectors: Sequence[Array] | Array, results: Array) -> Run:
        return lane_math.products(list(zip(matrices, vectors, results, strict=True)), self.memory.scratch)

    def _project(self, group: Group) -> Run:
        (stream,), (projected,) = self.find.of(group, (Kind.STREAM,), (Kind.DELTA_INPUT,))
        layers, eps, inverse, normed = self._layers(group), self.spec.norm_eps, self.inverse, self.normed
        norm = layers[0].attention_norm
        multiply = self._products([layer.wqkv for layer in layers], [normed] * len(layers), projected)

        def run() -> None:
            lane_math.rms_norm(stream, norm, eps, inverse, normed)
            multiply()

        return run

    def _out(self, group: Group) -> Run:
        (mixed,), (partials,) = self.find.of(group, (Kind.MIXED,), (Kind.PARTIAL,))
        return self._products([layer.wo for layer in self._layers(group)], mixed.reshape(*mixed.shape[:2], -1), partials)

    def _delta(self, group: Group) -> Run:
        (projected,), (mixed,) = self.find.of(group, (Kind.DELTA_INPUT,), (Kind.STATE, Kind.MIXED))
        step, cursor, own, m = group.steps[0], self.cursor, self.find.own(group), self.num_tokens
        net, lanes = self.spec.layers[step.layer].mixer, self.spec.num_lanes
        assert isinstance(net, DeltaNet)
        states = [[array[own] for array in cache] for cache in self.memory.states[step.layer]]
        key_heads, heads = net.num_key_heads // lanes, net.num_value_heads // lanes
        n, keys, values, channels = len(group.steps), net.keys // lanes, net.values // lanes, net.channels // lanes
        layers = [layer.own for layer in self._layers(group)]
        taps = np.stack([np.concatenate([layer[f"conv_{name}"] for name in "qkv"]) for layer in layers])  # (n, channels, width)
        decay, dt_bias, norm = (np.stack([layer[name] for layer in layers]) for name in ("decay", "dt_bias", "norm.weight"))
        rates = -_exp_of_rows(decay)  # (n, heads)
        empty, eps = self.memory.empty, self.spec.norm_eps
        inputs, terms, conv = empty(n, net.conv_width, channels), empty(n, channels), empty(n, 1, channels)
        activated = empty(n, 1, channels)
        in_heads = activated.reshape(n, channels)
        both = in_heads[:, : 2 * keys].reshape(n, 2 * key_heads, net.key_dim)  # query heads, then key heads
        value = in_heads[:, 2 * keys :].reshape(n, heads, net.value_dim)
        inverse = empty(n, 2 * key_heads, 1)
        query, key = empty(n, key_heads, net.key_dim), empty(n, key_heads, net.key_dim)
        queries, all_keys = empty(n, heads, net.key_dim), empty(n, heads, net.key_dim)
        scale = self.memory.dtype.type(net.key_dim**-0.5)
        factors, beta, kept = empty(n, heads), empty(n, 1, heads), empty(n, heads, net.value_dim)
        inverse_out, silu = empty(n, heads, 1), empty(n, 1, values)
        gates = silu.reshape(n, heads, net.value_dim)
        outer, weight = empty(n, heads, net.key_dim, net.value_dim), norm[:, None]
        repeat = heads // key_heads

        def run() -> None:
            state, past = states[cursor.kv_cache]
            if cursor.position == 0:
                state[...] = 0
                past[...] = 0
            for token in range(m):
                row = projected[:, token]
                inputs[:, :-1] = past
                inputs[:, -1] = row[:, :channels]
                past[...] = inputs[:, 1:]
                np.multiply(inputs[:, 0], taps[:, :, 0], out=conv[:, 0])
                for tap in range(1, net.conv_width):
                    np.multiply(inputs[:, tap], taps[:, :, tap], out=terms)
                    np.add(conv[:, 0], terms, out=conv[:, 0])
                lane_math.silu(conv, activated)
                np.vecdot(both, both, out=inverse[..., 0])
                np.add(inverse, _NORM_EPS, out=inverse)
                np.sqrt(inverse, out=inverse)
                np.divide(both[:, :key_heads], inverse[:, :key_heads], out=query)
                np.multiply(query, scale, out=query)
                np.divide(both[:, key_heads:], inverse[:, key_heads:], out=key)
                for head in range(heads):
                    queries[:, head], all_keys[:, head] = query[:, head // repeat], key[:, head // repeat]
                a, b = row[:, channels + values : channels + values + heads], row[:, channels + values + heads :]
                np.multiply(rates, _softplus(a + dt_bias), out=factors)
                for lane_factors in factors:
                    np.exp(lane_factors, out=lane_factors)
                lane_math.sigmoid(b[:, None], beta)
                np.multiply(state, factors[:, :, None, None], out=state)
                np.matmul(all_keys[:, :, None], state, out=kept[:, :, None])
                np.subtract(value, kept, out=kept)
                np.multiply(kept, beta[:, 0, :, None], out=kept)
                np.multiply(all_keys[..., None], kept[:, :, None], out=outer)
                np.add(state, outer, out=state)
                np.matmul(queries[:, :, None], state, out=kept[:, :, None])
                lane_math.rms_norm(kept, weight, eps, inverse_out, kept)
                lane_math.silu(row[:, None, channels : channels + values], silu)
                np.multiply(kept, gates, out=mixed[:, token])

        return run


def _exp_of_rows(values: Array) -> Array:
    return np.stack([np.exp(row) for row in values])


def _softplus(values: Array) -> Array:
    """log(1 + exp(values)) of each lane's (n, heads)."""
    return np.stack([np.logaddexp(0, row) for row in values]).astype(values.dtype)
