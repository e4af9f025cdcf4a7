"""The heads of a rank, and attention with them on its GPU."""

from __future__ import annotations

from kog_dist.workers.prefill.attention.attention_abi import AttentionShape
from kog_dist.workers.prefill.attention.hopper_attention import Attention, attention_on_gpu
from kog_dist.workers.prefill.base.cache_layout import CacheLayout


def attention_for(layout: CacheLayout) -> Attention:
    """Raises CompileError or LaunchError."""
    return attention_on_gpu(heads_of(layout), layout.spec.max_context)


def heads_of(layout: CacheLayout) -> AttentionShape:
    """The heads of a rank."""
    spec = layout.spec
    return AttentionShape(spec.head_dim, layout.num_lanes * spec.lane_heads, layout.heads, spec.lane_heads)
