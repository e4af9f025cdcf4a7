"""The heads of a rank, and attention with them on its GPU."""

from __future__ import annotations

from kog_dist.workers.prefill.attention.attention_abi import MAX_HEAD_DIM, AttentionShape
from kog_dist.workers.prefill.attention.hopper_attention import Attention, attention_on_gpu
from kog_dist.workers.prefill.attention.wide_attention import WideAttention, wide_attention_on_gpu
from kog_dist.workers.prefill.base.cache_layout import CacheLayout


def attention_for(layout: CacheLayout) -> Attention | WideAttention:
    """Raises CompileError or LaunchError."""
    heads = heads_of(layout)
    return wide_attention_on_gpu(heads) if is_wide(heads) else attention_on_gpu(heads, layout.spec.max_context)


def is_wide(heads: AttentionShape) -> bool:
    """Whether attention.cu cannot take them."""
    return heads.head_dim > MAX_HEAD_DIM


def heads_of(layout: CacheLayout) -> AttentionShape:
    """The heads of a rank."""
    spec = layout.spec
    return AttentionShape(spec.head_dim, layout.num_lanes * spec.lane_heads, layout.heads, spec.lane_heads)
