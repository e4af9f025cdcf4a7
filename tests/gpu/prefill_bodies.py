"""What one rank does in tests/gpu/test_prefill_ranks.py."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

from kog_dist.bench.kernel.prefill_ranks import prepared
from kog_dist.collectives.ranks import RankContext
from kog_dist.decode.coding import Coding
from kog_dist.errors import DeviceError
from kog_dist.model.spec import laneformer_2b
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.prefill.base.cache_layout import CacheLayout
from kog_dist.workers.prefill.gpu import Tuning
from tests.gpu.rank_bodies import KV_OF_VARIANT, VARIANTS

TUNING = Tuning((16, 32, 64, 128), exact_size=24, split_size=64)
SEED = 5


def fill(context: RankContext) -> dict[str, Any]:
    """Prompts through prefill: digests of every head's keys and values by layer; the logits of each prompt's last token, and of
    one that the kernel decodes behind it.
    """
    import cupy

    variant = str(context.arguments["variant"])
    spec = laneformer_2b() if variant == "2b" else VARIANTS[variant]
    coding = Coding(*context.arguments["coding"]) if "coding" in context.arguments else None
    tuning, kv_dtype = Tuning() if variant == "2b" else TUNING, KV_OF_VARIANT.get(variant, "bfloat16")
    comm, kernel, prefill = prepared(context, spec, SEED, tuning, coding=coding, kv_dtype=kv_dtype)
    layout = CacheLayout.of(kernel.shape)
    cache = kernel.kv.view(np.uint8 if layout.is_coded else np.uint16)
    ids: list[int] = np.random.default_rng(1).integers(0, spec.vocab_size, spec.max_context).tolist()
    heads, logits = [], []
    for end, start in (
        ((20, 0), (200, 0), (400, 200), (330, 100)) if variant != "2b" else ((40, 0), (129, 0), (2100, 0), (4000, 0))
    ):
        context.rendezvous.barrier(context.deadline)
        assert prefill.run(ids[:end], start, should_stop=lambda: False) == end
        cupy.cuda.Device().synchronize()
        context.rendezvous.barrier(context.deadline)
        kernel.begin(ids[:end], 1, SamplingParams(), first_position=end - 1, streams=prefill.streams)
        kernel.launch(1)
        kernel.finish()
        logits.append(kernel.logits.get().tolist())
        heads.append(
            [[_digest(cache, layout, layer, head) for head in range(layout.kv_heads)] for layer in range(spec.num_layers)]
        )
        context.rendezvous.barrier(context.deadline)
        kernel.begin(ids[: end + 1], 1, SamplingParams(), first_position=end)
        kernel.launch(1)
        kernel.finish()
        logits.append(kernel.logits.get().tolist())
    context.rendezvous.barrier(context.deadline)
    if comm is not None:
        comm.close()
    return {"heads": heads, "logits": logits}


def _digest(cache: Any, layout: CacheLayout, layer: int, head: int) -> str:
    import cupy

    return hashlib.sha256(cupy.ascontiguousarray(layout.batches_of(cache, layer)[head]).get().tobytes()).hexdigest()


def lonely(context: RankContext) -> dict[str, Any]:
    """Rank 0 alone goes through a prompt: how long until it gives up, and why; an abort first, or the limit."""
    comm, _, prefill = prepared(context, VARIANTS["delayed"], SEED, TUNING, limit_s=0.3)
    found: dict[str, Any] = {}
    if context.info.rank == 0:
        begin_s = time.monotonic()
        aborts_after_s = float(context.arguments["aborts_after_s"])
        try:
            ids = [1] * 300
            reached = prefill.run(ids, 0, should_stop=lambda: False, aborted=lambda: time.monotonic() - begin_s > aborts_after_s)
            found = {"reached": reached, "error": ""}
        except DeviceError as error:
            found = {"reached": -1, "error": str(error)}
        found["took_s"] = time.monotonic() - begin_s
    context.rendezvous.barrier(context.deadline)
    if comm is not None:
        comm.close()
    return found
