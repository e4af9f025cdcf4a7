"""The 2B shape with random weights: the oracle's logits at every length of context, and the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.model.laneformer import Laneformer
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import laneformer_2b
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_tensor, random_weights

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]

SPEC, SEED = laneformer_2b(), 1
IDS = np.random.default_rng(1).integers(0, SPEC.vocab_size, SPEC.max_context).tolist()
POSITIONS = (
    0, 1, 7, 8, 63, 64, 127, 128, 129, 300, 510, 511, 512, 513, 640, 1023, 1500, 1535, 1536, 2048, 3000, 3071, 3072, 3999, 4000,
)  # fmt: skip
LIMIT = 2e-3


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Laneformer]:
    """The model in float64 on the GPU: 18.6 GB."""
    import cupy

    with torch.device("meta"):
        module = Laneformer(SPEC, seed=None)
    weights = {}
    for name in tensor_layouts(SPEC):
        words = torch.as_tensor(random_tensor(SPEC, name, SEED).view(cupy.int16), device="cuda")
        weights[name] = words.view(torch.bfloat16).double()
    module.load_state_dict(weights, assign=True)
    yield module.to("cuda", torch.float64).eval()
    torch.cuda.empty_cache()


def kernel_of(lanes: int, **options: Any) -> Monokernel:
    shape = KernelShape(SPEC, range(lanes), **options)
    return Monokernel(shape, random_weights(shape, SEED))


def decode(kernel: Monokernel, first_position: int, last_position: int) -> None:
    """Feed IDS[first_position] to IDS[last_position], of which the last has logits."""
    kernel.begin(IDS[: last_position + 1], 1, SamplingParams(), first_position=first_position)
    kernel.launch(last_position + 1 - first_position)
    kernel.finish()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_logits_match_the_oracle(oracle: Laneformer, kv_dtype: str) -> None:
    oracle.round_keys_and_values(getattr(torch, kv_dtype))
    with torch.no_grad():
        streams = oracle.streams(torch.tensor([IDS[: POSITIONS[-1] + 1]], device="cuda"))
        wanted = oracle.logits(streams[:, :, list(POSITIONS)])[0].cpu().numpy()
    del streams
    torch.cuda.empty_cache()
    kernel, first, errors = kernel_of(8, kv_dtype=kv_dtype), 0, {}
    for position, logits in zip(POSITIONS, wanted, strict=True):
        decode(kernel, first, position)
        errors[position] = float(np.linalg.norm(kernel.logits.get() - logits) / np.linalg.norm(logits))
        first = position + 1
    print(f"{kv_dtype} cache:", ", ".join(f"{position}: {error:.1e}" for position, error in errors.items()))
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_same_bits_in_1000_launches_at_long_context(lanes: int) -> None:
    import cupy

    position = 3900
    kernel = kernel_of(lanes)
    decode(kernel, 0, position)
    logits, cache = kernel.logits.view(cupy.uint32).copy(), kernel.kv.copy()
    assert bool(cupy.isfinite(kernel.logits).all())
    for repeat in range(1000):
        # Only the newest position can be decoded again: windowed layers have overwritten what older ones would see.
        decode(kernel, position, position)
        assert bool(cupy.array_equal(kernel.logits.view(cupy.uint32), logits)), f"launch {repeat} has other logits"
    assert bool((kernel.kv == cache).all()), "the KV cache holds other values than after the first run"
    decode(kernel, 0, position)
    assert bool(cupy.array_equal(kernel.logits.view(cupy.uint32), logits)), "the whole context again has other logits"


def test_same_bits_over_30000_tokens() -> None:
    import cupy

    kernel, prompt = kernel_of(8), IDS[:20]
    sampling = SamplingParams(1.0, 7)  # random weights repeat themselves when they are greedy
    tokens = kernel.generate(prompt, 3000, sampling)
    assert len(tokens) == 3000
    assert len(set(tokens)) > 1000
    logits, cache = kernel.logits.view(cupy.uint32).copy(), kernel.kv.copy()
    for repeat in range(1, 10):
        assert kernel.generate(prompt, 3000, sampling) == tokens, f"request {repeat} has other tokens"
        assert bool(cupy.array_equal(kernel.logits.view(cupy.uint32), logits)), f"request {repeat} has other logits"
    assert bool((kernel.kv == cache).all())
