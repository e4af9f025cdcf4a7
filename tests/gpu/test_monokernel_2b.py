"""The 2B shape with random weights: the same bits at long context, launch after launch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from kog_dist.decode.sampling import Sampling
from kog_dist.model.spec import laneformer_2b
from kog_dist.workers.cuda.device_weights import random_weights
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.monokernel import Monokernel

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
POSITION = 3900


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_same_bits_at_long_context(lanes: int) -> None:
    spec = laneformer_2b()
    shape = KernelShape(spec, range(lanes))
    kernel = Monokernel(shape, random_weights(shape, 1))
    ids = np.random.default_rng(1).integers(0, spec.vocab_size, POSITION + 1).tolist()

    def digest_after(first_position: int) -> str:
        kernel.begin(ids, 1, Sampling(), first_position=first_position)
        kernel.launch(POSITION + 1 - first_position)
        kernel.finish()
        logits = kernel.logits.get()
        assert np.isfinite(logits).all()
        return hashlib.sha256(logits.tobytes()).hexdigest()

    whole = digest_after(0)
    cache = kernel.kv.copy()
    for first_position in [POSITION] * 300 + [POSITION - 1, POSITION - 20] * 10:
        assert digest_after(first_position) == whole, f"first position {first_position}"
    assert bool((kernel.kv == cache).all()), "the KV cache holds other values than after the first run"
