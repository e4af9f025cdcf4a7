"""KV caches in codes at real widths, few layers: kernel and prefill against the oracle that rounds as the definition does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kog_dist.bench.shapes import DENSE
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.laneformer import Laneformer
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.kv_format import CODE_BITS
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.prefill.gpu import matrices_for, prefill_for
from tests.gpu.test_prefill import begin_at_head, decode, fill, relative_error

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LENGTHS = (9, 700)  # of prompts
# A value next to a boundary between two codes may get the other one, which moves what comes behind it: at most this part of what
# all rounding does.
FLIPPED = 0.5
SHAPES = ("qwen3-4b", "llama-3.2-1b")  # heads of 128 values, normed; of 64


def spec_of(shape: str) -> ModelSpec:
    config = {**DENSE[shape], "num_hidden_layers": 3, "vocab_size": 8192, "max_position_embeddings": 1024}
    return read_config(config)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kv_dtype", CODE_BITS)
def test_logits_are_those_of_the_definition(tmp_path: Path, shape: str, kv_dtype: str) -> None:
    spec = spec_of(shape)
    write_checkpoint(tmp_path, spec, random_tensors(spec, 5), manifest=False)
    checkpoint = open_checkpoint(tmp_path)
    oracle = Laneformer.from_checkpoint(tmp_path, torch.float32).cuda().eval()
    ids: list[int] = np.random.default_rng(1).integers(0, spec.vocab_size, max(LENGTHS)).tolist()
    with torch.no_grad():
        exact = oracle(torch.tensor([ids], device="cuda"))[0].cpu().double().numpy()
        oracle.round_keys_and_values(kv_dtype)
        wanted = oracle(torch.tensor([ids], device="cuda"))[0].cpu().double().numpy()
    made = KernelShape(spec, range(spec.num_lanes), weight_dtype=checkpoint.dtype, kv_dtype=kv_dtype)
    matrices, observe = matrices_for(made)
    kernel = Monokernel(made, load_weights(made, checkpoint, observe))
    prefill, errors, effects = prefill_for(kernel, matrices), dict[str, float](), dict[str, float]()
    for length in LENGTHS:
        row, effects[f"{length}"] = wanted[length - 1], relative_error(exact[length - 1], wanted[length - 1])
        errors[f"{length} decoded"] = relative_error(decode(kernel, ids[:length], 0), row)
        fill(prefill, ids[:length])
        errors[f"{length} prefilled"] = relative_error(begin_at_head(kernel, prefill, ids[:length]), row)
    print(shape, kv_dtype, *({name: f"{error:.1e}" for name, error in some.items()} for some in (effects, errors)))
    for name, error in errors.items():
        assert error < FLIPPED * effects[name.split()[0]], name
    kernel.close()
