"""The calls of delta nets: what they project, and the state that every token changes, one after the other (`delta_rule`).

A pass that chooses leaves the state behind a request's first token, which alone is certain to count, and keeps what its drafts
were made of. Those that are accepted are done again from that, when it is known how many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kog_dist.decode.cpu import delta_rule, lane_math
from kog_dist.decode.cpu.cursor import Cursor
from kog_dist.decode.cpu.delta_rule import DeltaOperands, DeltaState, LaneNets
from kog_dist.decode.cpu.exchange_calls import ExchangeCalls
from kog_dist.decode.cpu.groups import Finder, Group
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.late_numpy import Array
from kog_dist.model.layers import DeltaNet
from kog_dist.model.weights import LayerWeights, RankWeights

Run = Callable[[], None]


class DeltaCalls:
    """Makes the calls of layers with a delta net, as `LaneCalls` does."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.memory, self.weights, self.cursor = find, find.memory, weights, cursor
        self.spec, self.num_tokens = cursor.plan.spec, find.num_tokens
        self.inverse = self.memory.empty(self.num_tokens, 1)
        self.normed = self.memory.empty(self.num_tokens, self.spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.DELTA_IN: self._project,
            Phase.DELTA: self._delta,
            Phase.OUT: self._out,
        }

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
        layer, own, cursor, m = group.steps[0].layer, self.find.own(group), self.cursor, self.num_tokens
        net = self.spec.layers[layer].mixer
        assert isinstance(net, DeltaNet)
        nets = LaneNets.of(net, self.spec.num_lanes, [weights.own for weights in self._layers(group)], self.spec.norm_eps)
        states = [DeltaState(*(array[own] for array in cache)) for cache in self.memory.states[layer]]
        drafts, channels, num_factors = self.memory.drafts[layer][own], nets.channels, 2 * nets.num_heads
        scratch = self.memory.scratch
        advance = delta_rule.bound(nets, DeltaOperands(projected, states, mixed), scratch)
        cursor.replays[layer, own.start] = delta_rule.bound(nets, DeltaOperands(drafts, states, None), scratch)

        def run() -> None:
            for cache, position, first, count in cursor.spans:
                if position == 0:
                    for array in states[cache]:
                        array[...] = 0
                advance(cache, first, count, count if cursor.reads else 1)
            if cursor.reads:
                return
            drafts[:, : m - 1, :channels] = projected[:, 1:, :channels]
            drafts[:, : m - 1, channels:] = projected[:, 1:, -num_factors:]

        return run
