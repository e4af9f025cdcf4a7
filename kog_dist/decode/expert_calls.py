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
from kog_dist.decode.matrix_products import CodedOperands, bound_to_coded_experts
from kog_dist.decode.steps import Kind, Phase
from kog_dist.errors import PlanError
from kog_dist.model.weights import MXFP4_CODES, ExpertWeights, LayerWeights, RankWeights

Run = Callable[[], None]


class ExpertCalls:
    """Makes the calls of models with experts. All arrays are allocated here, none of their size while a token runs."""

    def __init__(self, find: Finder, weights: RankWeights, cursor: Cursor, exchange: ExchangeCalls) -> None:
        self.find, self.memory, self.rank, self.weights, self.exchange = find, find.memory, find.rank, weights, exchange
        self.spec, self.cursor = cursor.plan.spec, cursor
        assert self.spec.experts is not None
        self.experts = self.spec.experts
        self.inverse, self.normed = self.memory.empty(1), self.memory.empty(self.spec.hidden_size)
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
        multiply = lane_math.products([(shared.router, normed, logits)])

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
        own = np.zeros(self.experts.per_token, np.float32)
        publish, collect = self.exchange.publisher(step.publishes), self.exchange.collector(step.waits)
        compares = step.waits is not None

        def run() -> None:
            lane_math.select(logits, scores, is_normalised, choice)
            if compares:
                own[:] = choice[0]
                publish(own)
                _compare(collect(own), step.layer, cursor.token)

        return run

    def _gate_up(self, group: Group) -> Run:
        (stream, choice), (activations,) = self.find.of(group, (Kind.STREAM, Kind.CHOICE), (Kind.ACTIVATION,))
        num_lanes, (chosen, width) = len(group.steps), activations.shape[1:]
        norm, _ = self._shared(group)
        eps, inverse, normed, clamp = self.spec.norm_eps, self.inverse, self.normed, self.experts.clamp
        gate_up = self.memory.empty(num_lanes, chosen, 2 * width)
        rows, outputs = gate_up.reshape(-1, 2 * width), activations.reshape(-1, width)
        inputs = np.broadcast_to(normed, (chosen, len(normed)))
        layers = self._layers(group)
        multiply = _products(layers, "w13", [inputs] * num_lanes, gate_up)
        biases = [None if layer.experts is None else layer.experts.w13_bias for layer in layers]
        weights = choice[1][:, None]

        def run() -> None:
            ids = _ids(choice)
            lane_math.rms_norm(stream, norm, eps, inverse, normed)
            multiply(ids)
            for bias, lane_rows in zip(biases, gate_up, strict=True):
                if bias is not None:
                    np.add(lane_rows, bias[ids], out=lane_rows)
            if clamp is None:
                lane_math.swiglu(rows, outputs)
            else:
                lane_math.clamped_swiglu(rows, outputs, clamp.alpha, clamp.limit)
            np.multiply(activations, weights, out=activations)

        return run

    def _down(self, group: Group) -> Run:
        (activations, choice), (partials,) = self.find.of(group, (Kind.ACTIVATION, Kind.CHOICE), (Kind.PARTIAL,))
        chosen, hidden = self.experts.per_token, self.spec.hidden_size
        results, scratch = self.memory.empty(len(group.steps), chosen, hidden), self.memory.empty(hidden)
        multiply = _products(self._layers(group), "w2", activations, results)
        bias = self._shared(group)[1].w2_bias if group.steps[0].lane == 0 else None  # of the sum over lanes

        def run() -> None:
            ids = _ids(choice)
            multiply(ids)
            np.copyto(partials, results[:, 0])
            for k in range(1, chosen):
                np.add(partials, results[:, k], out=partials)
            if bias is not None:
                for k, expert in enumerate(ids):
                    np.multiply(bias[expert], choice[1, k], out=scratch)
                    np.add(partials[0], scratch, out=partials[0])

        return run


def _products(
    layers: Sequence[LayerWeights], name: str, vectors: Sequence[Array] | Array, results: Array
) -> Callable[[Sequence[int]], None]:
    """Of the matrices `name` of each lane's experts, in MXFP4 or as they are, with its vectors (K, columns)."""
    matrices = [getattr(layer, name) for layer in layers]
    if matrices[0].dtype != MXFP4_CODES:
        return lane_math.chosen_products(list(zip(matrices, vectors, results, strict=True)))
    operands = []
    for layer, codes, inputs, out in zip(layers, matrices, vectors, results, strict=True):
        assert layer.experts is not None
        scales = layer.experts.w13_scales if name == "w13" else layer.experts.w2_scales
        assert scales is not None
        operands.append(CodedOperands(codes, scales, 0 if name == "w13" else layer.experts.w2_skew, inputs, out))
    return bound_to_coded_experts(operands)


def _ids(choice: Array) -> list[int]:
    return [int(expert) for expert in choice[0]]


def _compare(rows: Array, layer: int, token: int) -> None:
    """Raise PlanError if of the choices (ranks, K) of all ranks one differs."""
    found = choices.difference([tuple(map(int, row)) for row in rows], layer, token)
    if found:
        raise PlanError(found)
