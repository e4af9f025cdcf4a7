"""Quantised weights on a GPU: the kernel's logits are those of the definition, on CPU ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.kernel.shapes import DENSE
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import open_checkpoint, write_stored_checkpoint
from kog_dist.model.published_config import read_config
from kog_dist.workers.cuda.coded_source import coding_of
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_tensor
from tests.gpu.test_families import on_cpu
from tests.gpu.test_prefill import decode, relative_error

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT, TOKENS = 2, 4096, 128, 9
LIMIT = 1e-3  # as of 16-bit weights; a wrong scale or code is 1e-1


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-4b"])
@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_logits_of_weights_that_are_quantised_at_the_start(tmp_path: Path, shape: str, quantize: str) -> None:
    config = {**DENSE[shape], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    spec = read_config(config)
    write_stored_checkpoint(tmp_path, spec, lambda name: random_tensor(spec, name, 5).get(), max_shard_bytes=2**30)
    checkpoint = open_checkpoint(tmp_path, quantize=quantize)
    coding = coding_of(checkpoint)
    assert coding == (Coding("E4M3", 1, "F32") if quantize == "fp8" else Coding("INT4", 1, "BF16"))
    made = KernelShape(
        checkpoint.spec, range(checkpoint.spec.num_lanes), weight_dtype=checkpoint.dtype, kv_dtype="float16", coding=coding
    )
    kernel = Monokernel(made, load_weights(made, checkpoint))
    ids: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist()
    error = relative_error(decode(kernel, ids, 0), on_cpu(checkpoint, ids))
    kernel.close()
    print(shape, quantize, f"{error:.1e}")
    assert error < LIMIT
