"""How long the steps of one launch of the monokernel take."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np

from kog_dist.errors import ConfigError
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest


def token_times_us(
    kernel: Monokernel,
    context: int,
    tokens: int,
    sampling: SamplingParams | None = None,
    processed: ProcessedRequest | None = None,
    *,
    requests: int = 1,
    during: Any = None,
) -> list[float]:
    """Time of each of `tokens` - 1 steps of one launch that begins with `context` - 1 positions in the KV cache.

    A step is a pass; of several tokens all but its first are random ones, which hardly ever count. Of several requests, in as
    many slots and KV caches, a pass has a token of each. `during`: a context manager that is entered while the kernel runs.
    """
    import cupy

    max_context = kernel.shape.spec.max_context
    steps = min(tokens, max_context - context - 1)
    if steps < 2:
        raise ConfigError(f"a context of {context} leaves no room for tokens; the model's context is {max_context}")
    stamps = cupy.zeros(steps, cupy.uint64)
    expect_random(kernel)
    for slot in range(requests):
        kernel.use(slot)
        prompt = np.random.default_rng(1 + slot).integers(0, kernel.shape.spec.vocab_size, context).tolist()
        kernel.begin(
            prompt, max_context, sampling or SamplingParams(), first_position=context - 1, processed=processed, cache=slot
        )
    with during or nullcontext():
        if requests > 1:
            kernel.launch_together(range(requests), steps, stamps)
        else:
            kernel.launch(steps, stamps)
        kernel.finish()
    times: list[float] = (np.diff(stamps.get().astype(np.int64)) / 1000).tolist()
    return times


def expect_random(kernel: Monokernel) -> None:
    """Let passes of several tokens verify random ones."""
    if kernel.shape.tokens > 1:
        kernel.expect(
            0, np.random.default_rng(2).integers(0, kernel.shape.spec.vocab_size, kernel.shape.spec.max_context).tolist()
        )
