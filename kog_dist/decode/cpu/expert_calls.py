"""The calls of layers with experts: the router, its choice, and the products of the experts that were chosen.

The router and the choice are those of the rank, the same on all; products are one call for each lane and expert, with shapes that
the model alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kog_dist.decode import choices
from kog_dist.decode.cpu import lane_math
from kog_dist.decode.cpu.cursor import Cursor
from kog_dist.decode.cpu.exchange_calls import ExchangeCalls
from kog_dist.decode.cpu.groups import Finder, Group
from kog_dist.decode.cpu.matrix_products import ExpertOperands
from kog_dist.decode.plan.steps import Kind, Phase
from kog_dist.errors import PlanError
from kog_dist.late_numpy import Array
from kog_dist.model.layers import Experts
from kog_dist.model.weights import ExpertWeights, LayerWeights, RankWeights

Run = Callable[[], None]


class ExpertCalls:
    """Makes the calls of models with experts, as `LaneCalls` does."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.memory, self.rank, self.weights, self.exchange = find, find.memory, find.rank, weights, exchange
        self.spec, self.cursor = cursor.plan.spec, cursor
        self.num_tokens = find.num_tokens
        self.inverse = self.memory.empty(self.num_tokens, 1)
        self.normed = self.memory.empty(self.num_tokens, self.spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.ROUTE: self._route,
            Phase.SELECT: self._select,
            Phase.GATE_UP: self._gate_up,
            Phase.DOWN: self._down,
        }

    def _layers(self, group: Group) -> list[LayerWeights]:
        """Weights of the group's layer, of each of its lanes."""
        return [self.weights.lanes[step.lane].layers[step.layer] for step in group.steps]

    def _shared(self, group: Group) -> tuple[Array, ExpertWeights]:
        """The layer's norm, and what else all lanes share."""
        layer = self.weights.lanes[self.memory.lanes[0]].layers[group.steps[0].layer]
        assert layer.experts is not None
        return layer.ffn_norm, layer.experts

    def _experts(self, group: Group) -> Experts:
        """What the experts of the group's layer are."""
        ffn = self.spec.layers[group.steps[0].layer].ffn
        assert isinstance(ffn, Experts)
        return ffn

    def _route(self, group: Group) -> Run:
        (stream,), (logits,) = self.find.of(group, (Kind.STREAM,), (Kind.ROUTER_LOGITS,))
        norm, shared = self._shared(group)
        eps, bias, inverse, normed = self.spec.norm_eps, shared.router_bias, self.inverse, self.normed
        multiply = lane_math.products([(shared.router, normed, logits)], self.memory.scratch)

        def run() -> None:
            lane_math.rms_norm(stream, norm, eps, inverse, normed)
            multiply()
            if bias is not None:
                np.add(logits, bias, out=logits)

        return run

    def _select(self, group: Group) -> Run:
        (logits,), (choice,) = self.find.of(group, (Kind.ROUTER_LOGITS,), (Kind.CHOICE,))
        step, cursor, experts = group.steps[0], self.cursor, self._experts(group)
        per_token, num_experts, is_normalised = experts.choice.per_token, experts.choice.num_experts, experts.choice.is_normalised
        scores = self.memory.empty(num_experts)
        own = np.zeros((self.num_tokens, experts.num_slots), np.float32)
        publish, collect = self.exchange.publisher(step.publishes), self.exchange.collector(step.waits)
        compares = step.waits is not None

        def run() -> None:
            for token_logits, token_choice in zip(logits, choice, strict=True):
                lane_math.select(token_logits[:num_experts], scores, is_normalised, token_choice[:, :per_token])
            if experts.shared_width:
                choice[:, 0, per_token] = num_experts
                lane_math.sigmoid(logits[None, :, num_experts:], choice[None, :, 1, per_token:])
            if compares:
                own[:] = choice[:, 0]
                publish(own.reshape(-1))
                _compare(collect(own.reshape(-1)).reshape(-1, *own.shape), step.layer, cursor.position_of)

        return run

    def _gate_up(self, group: Group) -> Run:
        experts = self._experts(group)
        kinds = (Kind.ACTIVATION, Kind.SHARED_ACTIVATION)[: 1 + bool(experts.shared_width)]
        (stream, choice), (activations, *shared) = self.find.of(group, (Kind.STREAM, Kind.CHOICE), kinds)
        num_lanes, (num_tokens, chosen, width) = len(group.steps), activations.shape[1:]
        norm, _ = self._shared(group)
        eps, inverse, normed = self.spec.norm_eps, self.inverse, self.normed
        gate_up = self.memory.empty(num_lanes, num_tokens, chosen, 2 * width)
        activate = lane_math.activation(gate_up.reshape(-1, 2 * width), activations.reshape(-1, width), experts.choice.clamp)
        layers = self._layers(group)
        multiply = self._products(layers, "w13", [normed] * num_lanes, gate_up.reshape(num_lanes, -1, 2 * width))
        biases = [None if layer.experts is None else layer.experts.w13_bias for layer in layers]
        weights = choice[:, 1, :chosen, None]
        beside = [self._shared_gate_up(layers, normed, choice[:, 1, chosen:], own) for own in shared]

        def run() -> None:
            ids = choice[:, 0, :chosen].astype(np.intp)
            lane_math.rms_norm(stream, norm, eps, inverse, normed)
            multiply(ids)
            for bias, lane_rows in zip(biases, gate_up, strict=True):
                if bias is not None:
                    np.add(lane_rows, bias[ids], out=lane_rows)
            activate()
            np.multiply(activations, weights, out=activations)
            for call in beside:
                call()

        return run

    def _shared_gate_up(self, layers: Sequence[LayerWeights], normed: Array, weight: Array, activations: Array) -> Run:
        """The shared expert's activations (lanes, m, S), times its weight (m, 1)."""
        num_lanes, num_tokens, width = activations.shape
        gate_up = self.memory.empty(num_lanes, num_tokens, 2 * width)
        multiply = self._plain_products(layers, "shared_w13", [normed] * num_lanes, gate_up)
        activate = lane_math.activation(gate_up.reshape(-1, 2 * width), activations.reshape(-1, width))

        def run() -> None:
            multiply()
            activate()
            np.multiply(activations, weight, out=activations)

        return run

    def _plain_products(self, layers: Sequence[LayerWeights], name: str, vectors: Sequence[Array] | Array, results: Array) -> Run:
        """Of a matrix that each lane has beside its experts."""
        triples = []
        for layer, inputs, out in zip(layers, vectors, results, strict=True):
            assert layer.experts is not None
            triples.append((getattr(layer.experts, name), inputs, out))
        return lane_math.products(triples, self.memory.scratch)

    def _down(self, group: Group) -> Run:
        experts = self._experts(group)
        kinds = (Kind.ACTIVATION, Kind.SHARED_ACTIVATION)[: 1 + bool(experts.shared_width)]
        (activations, *shared, choice), (partials,) = self.find.of(group, (*kinds, Kind.CHOICE), (Kind.PARTIAL,))
        num_lanes, chosen, hidden = len(group.steps), experts.choice.per_token, self.spec.hidden_size
        results = self.memory.empty(num_lanes, self.num_tokens, chosen, hidden)
        vectors, products = activations.reshape(num_lanes, -1, activations.shape[3]), results.reshape(num_lanes, -1, hidden)
        multiply = self._products(self._layers(group), "w2", vectors, products)
        bias = self._shared(group)[1].w2_bias if group.steps[0].lane == 0 else None  # of the sum over lanes
        beside = self.memory.empty(num_lanes, self.num_tokens, hidden)
        of_shared = [self._plain_products(self._layers(group), "shared_w2", own, beside) for own in shared]

        def run() -> None:
            ids = choice[:, 0, :chosen].astype(np.intp)
            multiply(ids)
            np.copyto(partials, results[:, :, 0])
            for k in range(1, chosen):
                np.add(partials, results[:, :, k], out=partials)
            for call in of_shared:
                call()
                np.add(partials, beside, out=partials)
            if bias is not None:
                for k in range(chosen):
                    np.add(partials[0], bias[ids[:, k]] * choice[:, 1, k, None], out=partials[0])

        return run

    def _products(
        self, layers: Sequence[LayerWeights], name: str, vectors: Sequence[Array] | Array, results: Array
    ) -> Callable[[Array], None]:
        """Of the matrices `name` of each lane's experts, in MXFP4 or as they are; see `ExpertOperands`."""
        operands = []
        for layer, inputs, out in zip(layers, vectors, results, strict=True):
            assert layer.experts is not None
            scales, skew = (layer.experts.w13_scales, 0) if name == "w13" else (layer.experts.w2_scales, layer.experts.w2_skew)
            operands.append(ExpertOperands(getattr(layer, name), inputs, out, scales, skew))
        return lane_math.chosen_products(operands, self.memory.scratch)


def _compare(of_ranks: Array, layer: int, position_of: Callable[[int], int]) -> None:
    """Raise PlanError if of the choices (ranks, tokens, K) of all ranks one differs; the first token where one does is named."""
    differing = np.flatnonzero((of_ranks != of_ranks[:1]).any(axis=(0, 2)))
    if differing.size:
        rows = of_ranks[:, differing[0]]
        raise PlanError(choices.difference([tuple(map(int, row)) for row in rows], layer, position_of(int(differing[0]))))
