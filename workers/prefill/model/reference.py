"""What prefill of all models does alike, in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kog_dist.model.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor


def attend(spec: ModelSpec, query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Outputs (L, size, heads of a lane * head_dim) of `query` (size, L * heads, head_dim), whose rows stand at the positions
    from `start` on. A token sees itself and the `window` - 1 before it, or all, of `keys` and `values` (positions, KV heads,
    head_dim).
    """
    import torch

    size = len(query)
    end = start + size
    positions = torch.arange(start, end, device=query.device)[:, None]
    first = 0 if window is None else max(0, start - window + 1)
    others = torch.arange(first, end, device=query.device)
    seen = others <= positions
    if window is not None:
        seen &= others > positions - window
    group = spec.lane_heads // spec.lane_kv_heads
    heads = query.float().view(size, -1, group, spec.head_dim).permute(1, 2, 0, 3)
    k, v = (part[first:end].float().transpose(0, 1)[:, None] for part in (keys, values))
    scores = (heads @ k.transpose(2, 3)) * spec.head_dim**-0.5  # (KV heads, group, size, positions)
    chances = scores.masked_fill(~seen, -math.inf).softmax(-1)
    mixed = (chances @ v).to(query.dtype)  # (KV heads, group, size, head_dim)
    by_lane = mixed.view(-1, spec.lane_heads, size, spec.head_dim)
    outputs: Tensor = by_lane.transpose(1, 2).reshape(len(by_lane), size, -1)
    return outputs


def tree_sum(partial: Tensor) -> Tensor:
    """Sum over the lanes (the first dimension), float32, as a binary tree of neighbours."""
    terms = partial.float()
    while len(terms) > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]
