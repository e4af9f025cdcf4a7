"""Answers of the build with processors against the definition: the kernel's own logits, chosen from by `Sampler` on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kog_dist.decode.reported import TokenLogprobs
from kog_dist.decode.sampling import Sampler, token_logprobs
from kog_dist.runtime.masks import MaskWords
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.processors import ProcessedRequest

# By name: sampling, and what is asked for besides.
Case = tuple[SamplingParams, ProcessedRequest]


def logprobs_of(kernel: Monokernel, request: ProcessedRequest, count: int) -> list[TokenLogprobs]:
    """Those that the kernel has reported of the newest request."""
    if request.sampling.logprobs is None:
        return []
    found = [kernel.logprobs(index) for index in range(count)]
    assert None not in found, f"no report of token {found.index(None)}"
    return [logprobs for logprobs in found if logprobs is not None]


def logits_behind(kernel: Monokernel, tokens: Sequence[int]) -> Any:
    """The logits of the last of these tokens; the others are in the KV cache."""
    kernel.begin(tokens, 1, SamplingParams(), first_position=len(tokens) - 1)
    kernel.launch(1)
    kernel.finish()
    return np.asarray(kernel.logits.get())


def check(
    kernel: Monokernel, prompt: Sequence[int], found: Sequence[int], logprobs: Sequence[TokenLogprobs], case: Case,
    stop_ids: Sequence[int] = (), masks: Sequence[MaskWords] = (),
) -> None:  # fmt: skip
    """Assert that an answer (`found`, `logprobs`), which the kernel has just given, is that of the definition."""
    sampling, request = case
    asked = replace(request.sampling, temperature=sampling.temperature, seed=sampling.seed)
    shaper = Sampler(kernel.shape.spec.vocab_size, prompt, asked, stop_ids)
    tokens = list(prompt)
    for index, token_id in enumerate(found):
        logits = logits_behind(kernel, tokens)
        wanted = shaper.choose(logits, len(tokens) - 1, masks[index] if masks else None)
        assert token_id == wanted.token_id, f"token {index} of {case}"
        if request.sampling.logprobs is not None:
            assert logprobs[index] == token_logprobs(logits, token_id, request.sampling.logprobs), f"token {index} of {case}"
        shaper.accept(token_id)
        tokens.append(token_id)
