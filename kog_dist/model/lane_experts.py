"""The FFN of models with experts in torch: router, choice, and the experts' own parts of lanes (docs/moe.md)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.lane_linear import LaneLinear, lane_matmul
from kog_dist.model.spec import ModelSpec


class Expert(nn.Module):
    """One expert of all lanes."""

    def __init__(self, spec: ModelSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        lanes, d = spec.num_lanes, spec.hidden_size
        self.w1 = LaneLinear(lanes, spec.lane_ffn, d, has_bias=experts.bias)
        self.w2 = LaneLinear(lanes, d, spec.lane_ffn)
        self.w3 = LaneLinear(lanes, spec.lane_ffn, d, has_bias=experts.bias)
        if experts.bias:
            self.w2.bias = nn.Parameter(torch.zeros(d))  # of the sum over lanes: the first one adds it
        self.has_bias, self.clamp = experts.bias, experts.clamp

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """Partial sums (lanes, 1, rows, hidden) of `x` (1, 1, rows, hidden), each row times its weight (rows,)."""
        gate, up = lane_matmul(x, self.w1.weight), lane_matmul(x, self.w3.weight)
        if self.has_bias:
            gate, up = gate + self.w1.bias[:, None, None], up + self.w3.bias[:, None, None]
        partial = lane_matmul(self._activation(gate, up, self.clamp) * weights[:, None], self.w2.weight)
        return torch.cat((partial[:1] + self.w2.bias * weights[:, None], partial[1:])) if self.has_bias else partial

    @staticmethod
    def _activation(gate: Tensor, up: Tensor, clamp: ClampedSwiglu | None) -> Tensor:
        if clamp is None:
            return functional.silu(gate) * up
        gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
        return (up + 1) * gate * torch.sigmoid(clamp.alpha * gate)


class LaneExperts(nn.Module):
    """A layer's experts; `x` is the one stream that all lanes share."""

    def __init__(self, spec: ModelSpec, experts: ExpertsSpec) -> None:
        super().__init__()
        self.per_token, self.is_normalised = experts.per_token, experts.is_normalised
        self.router = nn.Linear(spec.hidden_size, experts.num_experts, bias=experts.router_bias)
        self.experts = nn.ModuleList(Expert(spec, experts) for _ in range(experts.num_experts))
        self.lanes = spec.num_lanes

    def forward(self, x: Tensor) -> Tensor:
        """Partial sums (lanes, batch, time, hidden) of the normalised stream `x` (1, batch, time, hidden)."""
        rows = x.reshape(1, 1, -1, x.shape[-1])
        logits = self.router(rows[0, 0])
        largest, ids = torch.topk(logits, self.per_token)
        weights = largest.softmax(-1) if self.is_normalised else logits.softmax(-1).gather(1, ids)
        out = rows.new_zeros(self.lanes, *rows.shape[1:])
        for idx, expert in enumerate(self.experts):
            row, place = torch.where(ids == idx)
            if len(row):
                out = out.index_add(2, row, expert(rows[:, :, row], weights[row, place]))
        return out.view(self.lanes, *x.shape[1:])
