"""Passes of several tokens: tokens and logits have the bits of plain decoding, whatever is drafted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel.shapes import SEED, named_shape
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.device_weights import DeviceWeights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_weights

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

NAMES = ["llama-3.2-1b@600", "qwen3-0.6b@600"]  # heads of 64; normed ones of 128
NUM_PROMPT, NUM_FED, NUM_TOKENS = 500, 30, 64  # the first positions of the cache are empty
WRONG = (range(0), (3, 4, 9, 15, 16, 17, 18, 30, 63), range(NUM_TOKENS))  # drafts that are


def kernel_of(name: str, tokens: int, weights: DeviceWeights | None = None) -> Monokernel:
    spec, codings = named_shape(name)
    shape = KernelShape(spec, range(spec.num_lanes), tokens=tokens, **codings)
    return Monokernel(shape, weights if weights is not None else random_weights(shape, SEED))


def answer(kernel: Monokernel, sampling: SamplingParams, drafts: Sequence[int] = ()) -> tuple[list[int], Any, int]:
    """Tokens, the logits of the last one, and the number of passes."""
    prompt = np.random.default_rng(1).integers(0, kernel.shape.spec.vocab_size, NUM_PROMPT).tolist()
    kernel.kv.fill(0)
    if drafts:
        kernel.expect(NUM_PROMPT, drafts)
    before = int(kernel.state()["pass_epoch" if kernel.shape.tokens > 1 else "epoch"])
    kernel.begin(prompt, NUM_TOKENS, sampling, first_position=NUM_PROMPT - NUM_FED)
    for _ in range(2):  # a launch goes on where the one before has ended
        kernel.launch(NUM_FED)
    kernel.launch(NUM_TOKENS)
    kernel.finish()
    tokens = [kernel.token(index) for index in range(NUM_TOKENS)]
    return (
        [token.token_id for token in tokens if token is not None],
        kernel.logits.get(),
        int(kernel.state()["pass_epoch" if kernel.shape.tokens > 1 else "epoch"]) - before,
    )


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.7, seed=3)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", NAMES)
def test_passes_have_the_bits_of_plain_decoding(name: str, sampling: SamplingParams) -> None:
    plain_kernel = kernel_of(name, 1)
    tokens, logits, _ = answer(plain_kernel, sampling)
    assert len(tokens) == NUM_TOKENS
    vocab = plain_kernel.shape.spec.vocab_size
    for per_pass in (2, 4):
        kernel = kernel_of(name, per_pass, plain_kernel.weights)
        for wrong in WRONG:
            drafts = [(token + (index in wrong)) % vocab for index, token in enumerate(tokens)]
            found, found_logits, passes = answer(kernel, sampling, drafts)
            assert found == tokens
            assert found_logits.tobytes() == logits.tobytes()
            if not wrong:
                assert passes == -(-(NUM_FED - 1 + NUM_TOKENS) // per_pass)
