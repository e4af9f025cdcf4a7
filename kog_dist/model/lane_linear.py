"""Matrices of lanes in torch, which all modules of the oracle are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LaneLinear(nn.Module):
    """One matrix per lane; `weight` is (lanes, out, in)."""

    def __init__(self, lanes: int, out_features: int, in_features: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, out_features, in_features))
        if has_bias:
            self.bias = nn.Parameter(torch.zeros(lanes, out_features))


def lane_matmul(stream: Tensor, weight: Tensor) -> Tensor:
    """Each lane's `stream` (lanes or 1, batch, time, in) times its `weight` (lanes, out, in): (lanes, batch, time, out)."""
    lanes, out_features, in_features = weight.shape
    batch, time = stream.shape[1], stream.shape[2]
    if stream.shape[0] == 1:  # all lanes read the same rows: one wide product instead of `lanes` copies
        wide = functional.linear(stream[0], weight.reshape(lanes * out_features, in_features))
        return wide.view(batch, time, lanes, out_features).permute(2, 0, 1, 3)
    rows = stream.reshape(lanes, batch * time, in_features)
    return torch.bmm(rows, weight.transpose(1, 2)).view(lanes, batch, time, out_features)
