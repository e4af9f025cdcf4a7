"""What kernels of several rooms are compiled for."""

from __future__ import annotations

from kog_dist.workers.cuda.cache_shape import BATCH
from kog_dist.workers.cuda.kv_format import FORMATS, kv_lines
from kog_dist.workers.prefill.base.cache_layout import CacheLayout

UNIT = 8  # neighbouring values that a thread of the fused kernels takes at once
MAX_THREADS = 512  # of a thread block


def threads_for(num_items: int) -> int:
    """Threads of a thread block for so many items, each of which one thread takes: whole warps."""
    return min(MAX_THREADS, -(-num_items // 32) * 32)


def cache_lines(layout: CacheLayout, weight_dtype: str, kv_dtype: str) -> list[str]:
    """What cache_place.cuh needs to find keys and values, and the formats of weights and cache."""
    spec = layout.spec
    numbers = {
        "kSplits": layout.splits,
        "kSharingLanes": layout.sharing_lanes,
        "kWindowBatches": layout.window_batches,
        "kFullBatches": layout.full_batches,
        "kBatch": BATCH,
    }
    is_windowed = ", ".join("false" if spec.window(layer) is None else "true" for layer in range(spec.num_layers))
    first_batches = ", ".join(map(str, layout.first_batches))
    return [
        *(f"constexpr int {name} = {value};" for name, value in numbers.items()),
        f"constexpr unsigned long long kCacheBytes = {layout.num_bytes}ull;",
        *(["#define KOG_WHOLE_WINDOWS"] if layout.whole_windows else []),
        f"__constant__ const bool kIsWindowed[] = {{{is_windowed}}};",
        f"__constant__ const unsigned long long kFirstBatches[] = {{{first_batches}}};",
        f"using WeightFormat = {FORMATS[weight_dtype]};",
        *kv_lines(kv_dtype, spec.head_dim),
    ]
