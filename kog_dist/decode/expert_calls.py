"""The calls of layers with experts: the router, its choice, and the products of the experts that were chosen.

The router and the choice are those of the rank, the same on all; products are one call for each lane and expert, with shapes that
the model alone decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kog_dist.decode import choices, lane_math
from kog_dist.decode.cursor import Cursor
from kog_dist.decode.exchange_calls import ExchangeCalls
from kog_dist.decode.groups import Array, Finder, Group
from kog_dist.decode.matrix_products import ExpertOperands
from kog_dist.decode.steps import Kind, Phase
from kog_dist.errors import PlanError
from kog_dist.model.weights import ExpertWeights, LayerWeights, RankWeights

Run = Callable[[], None]


class ExpertCalls:
    """Makes the calls of models with experts, as `LaneCalls` does."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.memory, self.rank, self.weights, self.exchange = find, find.memory, find.rank, weights, exchange
        self.spec, self.cursor = cursor.plan.spec, cursor
        assert self.spec.experts is not None
        self.experts = self.spec.experts
        self.num_tokens = find.num_tokens
        self.inverse = self.memory.empty(self.num_tokens, 1)
        self.normed = self.memory.empty(self.num_tokens, self.spec.hidden_size)
        self.makers: dict[Phase, Callable[[Group], Run]] = {
            Phase.ROUTE: self._route, Phase.SELECT: self._select, Phase.GATE_UP: self._gate_up, Phase.DOWN: self._down,
        }  # fmt: skip

    def _layers(self, group: Group) -> list[LayerWeights]:
        """Weights of the group's layer, of each of its lanes."""
        return [self.weights.lanes[step.lane].layers[step.layer] for step in group.steps]

    def _shared(self, group: Group) -> tuple[Array, ExpertWeights]:
        """The layer's norm, and what else all lanes share."""
        layer = self.weights.lanes[self.memory.lanes[0]].layers[group.steps[0].layer]
        assert layer.experts is not None
        return layer.ffn_norm, layer.experts

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
        step, cursor, is_normalised = group.steps[0], self.cursor, self.experts.is_normalised
        scores = self.memory.empty(self.experts.num_experts)
        own = np.zeros((self.num_tokens, self.experts.per_token), np.float32)
        publish, collect = self.exchange.publisher(step.publishes), self.exchange.collector(step.waits)
        compares = step.waits is not None

        def run() -> None:
            for token_logits, token_choice in zip(logits, choice, strict=True):
                lane_math.select(token_logits, scores, is_normalised, token_choice)
            if compares:
                own[:] = choice[:, 0]
                publish(own.reshape(-1))
                _compare(collect(own.reshape(-1)), step.layer, cursor.token)

        return run

    def _gate_up(self, group: Group) -> Run:
        (stream, choice), (activations,) = self.find.of(group, (Kind.STREAM, Kind.CHOICE), (Kind.ACTIVATION,))
        num_lanes, (num_tokens, chosen, width) = len(group.steps), activations.shape[1:]
        norm, _ = self._shared(group)
        eps, inverse, normed = self.spec.norm_eps, self.inverse, self.normed
        gate_up = self.memory.empty(num_lanes, num_tokens, chosen, 2 * width)
        activate = lane_math.activation(gate_up.reshape(-1, 2 * width), activations.reshape(-1, width), self.experts.clamp)
        layers = self._layers(group)
        multiply = self._products(layers, "w13", [normed] * num_lanes, gate_up.reshape(num_lanes, -1, 2 * width))
        biases = [None if layer.experts is None else layer.experts.w13_bias for layer in layers]
        weights = choice[:, 1, :, None]

        def run() -> None:
            ids = choice[:, 0].astype(np.intp)
            lane_math.rms_norm(stream, norm, eps, inverse, normed)
            multiply(ids)
            for bias, lane_rows in zip(biases, gate_up, strict=True):
                if bias is not None:
                    np.add(lane_rows, bias[ids], out=lane_rows)
            activate()
            np.multiply(activations, weights, out=activations)

        return run

    def _down(self, group: Group) -> Run:
        (activations, choice), (partials,) = self.find.of(group, (Kind.ACTIVATION, Kind.CHOICE), (Kind.PARTIAL,))
        num_lanes, chosen, hidden = len(group.steps), self.experts.per_token, self.spec.hidden_size
        results = self.memory.empty(num_lanes, self.num_tokens, chosen, hidden)
        vectors, products = activations.reshape(num_lanes, -1, activations.shape[3]), results.reshape(num_lanes, -1, hidden)
        multiply = self._products(self._layers(group), "w2", vectors, products)
        bias = self._shared(group)[1].w2_bias if group.steps[0].lane == 0 else None  # of the sum over lanes

        def run() -> None:
            ids = choice[:, 0].astype(np.intp)
            multiply(ids)
            np.copyto(partials, results[:, :, 0])
            for k in range(1, chosen):
                np.add(partials, results[:, :, k], out=partials)
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


def _compare(rows: Array, layer: int, token: int) -> None:
    """Raise PlanError if of the choices (ranks, tokens * K) of all ranks one differs."""
    found = choices.difference([tuple(map(int, row)) for row in rows], layer, token)
    if found:
        raise PlanError(found)
