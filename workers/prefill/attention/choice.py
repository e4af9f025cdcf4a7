"""Whose attention a chunk of tokens gets: ours where it is made for the GPU and the heads, else torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kog_dist.workers.prefill.attention import attention_abi
from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.attention.hopper_attention import Attention, attention_on_gpu
from kog_dist.workers.prefill.hopper_abi import HOPPER
from kog_dist.workers.prefill.model.cache_layout import CacheLayout

if TYPE_CHECKING:
    from torch import Tensor


def attention_for(layout: CacheLayout) -> Attention | None:
    """Attention of our own, if this GPU and this model are those it is made for. Raises CompileError or LaunchError."""
    import torch

    spec = layout.spec
    if torch.cuda.get_device_capability() != HOPPER or attention_abi.misfit(spec.head_dim):
        return None
    return attention_on_gpu(heads_of(layout), spec.max_context)


def heads_of(layout: CacheLayout) -> AttentionShape:
    """The heads of a rank."""
    spec = layout.spec
    return AttentionShape(spec.head_dim, layout.num_lanes * spec.lane_heads, layout.heads, spec.lane_heads)


def flash_attention(
    query: Tensor, keys: Tensor, values: Tensor, query_bounds: Tensor, place: Tensor, window: int | None, num_lanes: int
) -> Tensor:
    """Outputs (lanes, size, heads of a lane * head_dim) by torch's flash attention, queued on its current stream.

    The rows of `query` (size, heads, head_dim) stand at the end of the keys, whose number is read on the device: `place[2]`.
    `query_bounds`: int32, 0 and size.
    """
    import torch

    mixed = torch.ops.aten._flash_attention_forward(
        query, keys, values, query_bounds, place[1:3], len(query), len(keys), 0.0, True, False,
        scale=query.shape[2] ** -0.5, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip
    by_lane: Tensor = mixed.view(len(query), num_lanes, -1)
    return by_lane.transpose(0, 1)
