"""Experts in plain array code: what experts.cu computes, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kog_dist.model.experts import ClampedSwiglu
from kog_dist.model.layout import ffn_prefixes
from kog_dist.model.spec import ModelSpec
from kog_dist.records import dataclass
from kog_dist.workers.prefill.base.arrays import Array, float32_of
from kog_dist.workers.prefill.base.reference import multiply, silu

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import DenseMatrices
    from kog_dist.workers.prefill.buffers.dense import DenseRows
    from kog_dist.workers.prefill.buffers.experts import ExpertRows


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """The E experts of a layer in L hosted lanes. Biases are float32; None: there are none."""

    w13: Array  # (E, L, 2F, D): gate rows, up rows
    w2: Array  # (E, L, D, F)
    w13_bias: Array | None = None  # (E, L, 2F)
    w2_bias: Array | None = None  # (E, D); None, too, where the first lane is not hosted


def plain_experts(spec: ModelSpec, layer: int, lanes: range, tensor: Callable[[str], Array]) -> PlainExperts:
    """Of a model whose whole tensors can be asked for by name."""
    assert spec.experts is not None
    hosted = slice(lanes[0], lanes[-1] + 1)

    def stacked(*names: str) -> Array:
        parts = ([tensor(f"{start}{name}")[hosted] for name in names] for start in ffn_prefixes(spec, layer))
        return np.stack([np.concatenate(of_expert, axis=1) for of_expert in parts])

    w13, w2 = stacked("w1.weight", "w3.weight"), stacked("w2.weight")
    if not spec.experts.bias:
        return PlainExperts(w13, w2)
    down = np.stack([tensor(f"{start}w2.bias") for start in ffn_prefixes(spec, layer)])
    return PlainExperts(w13, w2, stacked("w1.bias", "w3.bias"), down if lanes[0] == 0 else None)


def mix(spec: ModelSpec, rows: DenseRows, matrices: DenseMatrices, experts: PlainExperts, num_tokens: int, scale: float) -> None:
    """`DenseOperations.mix`. `num_tokens`: rows that are not behind the prompt's last token; `scale`: of activations."""
    numbers, own = spec.experts, rows.experts
    assert numbers is not None
    assert own is not None
    assert matrices.router is not None
    multiply(own.planes, matrices.router[None], own.logits)
    _choose(own, matrices.router_bias, numbers.is_normalised, num_tokens)
    rows.partial.fill(0)
    sums = np.zeros(rows.partial.shape, np.float32)
    for k in range(numbers.per_token):
        for row in range(min(rows.size, num_tokens)):
            expert, weight = int(own.chosen[row, k]), own.weights[row, k]
            gate_up = np.empty((len(sums), 1, 2 * spec.lane_ffn), np.float32)
            multiply(rows.x[None, row : row + 1], experts.w13[expert], gate_up)
            if experts.w13_bias is not None:
                gate_up += experts.w13_bias[expert][:, None]
            activation = (_activation(gate_up, numbers.clamp) * np.float32(scale)).astype(rows.x.dtype)
            result = np.empty((len(sums), 1, spec.hidden_size), rows.x.dtype)
            multiply(activation, experts.w2[expert], result)
            given = float32_of(result[:, 0])
            if experts.w2_bias is not None:
                given[0] += experts.w2_bias[expert] * np.float32(scale)
            sums[:, row] += weight * given
    rows.partial[...] = sums


def _choose(own: ExpertRows, bias: Array | None, is_normalised: bool, num_tokens: int) -> None:
    """The experts with the largest logits, of equal ones those with the smaller number, in ascending order."""
    logits = own.logits[0] + own.logits[1]
    if bias is not None:
        logits = logits + bias
    order = np.argsort(-logits, axis=1, kind="stable")[:, : own.chosen.shape[1]]
    own.chosen[...] = np.sort(order, axis=1)
    terms = np.exp(logits - logits.max(1, keepdims=True))
    chosen = np.take_along_axis(terms, own.chosen, axis=1)
    own.weights[...] = chosen / (chosen if is_normalised else terms).sum(1, keepdims=True)
    own.chosen[max(num_tokens, 0) :] = -1


def _activation(gate_up: Array, clamp: ClampedSwiglu | None) -> Array:
    gate, up = np.split(gate_up, 2, axis=-1)
    if clamp is None:
        gated: Array = silu(gate) * up
        return gated
    gate, up = np.minimum(gate, np.float32(clamp.limit)), np.clip(up, -np.float32(clamp.limit), np.float32(clamp.limit))
    activation: Array = (up + 1) * gate / (1 + np.exp(-np.float32(clamp.alpha) * gate))
    return activation
