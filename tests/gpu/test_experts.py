"""Experts on a GPU, at the width of real models: the kernel's logits are those of CPU ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.bench.kernel.shapes import MOE
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import open_checkpoint, write_stored_checkpoint
from kog_dist.model.formats.numbers import NUMBERS
from kog_dist.model.layout import EXPERTS
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.device_weights import from_tensors, needed_rows, to_words
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_codes, random_tensor
from tests.gpu.test_families import on_cpu
from tests.gpu.test_prefill import decode, relative_error

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT, TOKENS, SEED = 2, 4096, 256, 9, 5
LIMIT = 1e-3  # as of dense models; a wrong expert, weight or scale is 1e-1
MXFP4 = Coding("E2M1", 4, "E8M0")


def few_experts(name: str, num_experts: int) -> ModelSpec:
    """A named shape with few layers and experts."""
    config = {**MOE[name], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    spec = read_config({**config, "num_experts": num_experts} if "num_experts" in config else config)
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, num_experts=num_experts))


def ids() -> list[int]:
    drawn: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist()
    return drawn


def shape_of(spec: ModelSpec, coding: Coding | None = None) -> KernelShape:
    return KernelShape(spec, range(spec.num_lanes), weight_dtype="bfloat16", kv_dtype="float16", coding=coding)


@pytest.mark.parametrize(("name", "num_experts"), [("qwen3-30b-a3b", 12), ("gpt-oss-20b", 6)])
def test_logits_of_experts_in_16_bit(tmp_path: Path, name: str, num_experts: int) -> None:
    spec = few_experts(name, num_experts)
    write_stored_checkpoint(tmp_path, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30)
    checkpoint = open_checkpoint(tmp_path)
    shape = shape_of(checkpoint.spec)
    kernel = Monokernel(shape, load_weights(shape, checkpoint))
    error = relative_error(decode(kernel, ids(), 0), on_cpu(checkpoint, ids()))
    kernel.close()
    print(name, f"{error:.1e}")
    assert error < LIMIT


def test_logits_of_experts_in_mxfp4(tmp_path: Path) -> None:
    """CPU ranks have the values of the codes, which are exact in bfloat16."""
    import cupy

    spec = few_experts("gpt-oss-20b", 6)
    shape = shape_of(spec, MXFP4)
    assert shape.experts is not None
    numbers = cupy.asarray(NUMBERS["E2M1"].values)

    def stored(name: str) -> Any:
        if EXPERTS not in name or not name.endswith("weight"):
            return random_tensor(spec, name, SEED).get()
        lanes = []
        for lane in range(spec.num_lanes):
            codes, scales = random_codes(shape, name, lane, SEED).parts()
            skew = shape.experts.skew(lane) if name.endswith("w2.weight") and shape.experts is not None else 0
            lanes.append(numbers[codes] * scales[:, (np.arange(codes.shape[1]) + skew) // 32])
        return to_words(cupy.stack(lanes), "bfloat16").get()

    write_stored_checkpoint(tmp_path, spec, stored, max_shard_bytes=2**30)
    weights = from_tensors(
        shape,
        lambda name: random_tensor(spec, name, SEED)[slice(*needed_rows(shape, name))],
        lambda name, lane: random_codes(shape, name, lane, SEED),
    )
    kernel = Monokernel(shape, weights)
    error = relative_error(decode(kernel, ids(), 0), on_cpu(open_checkpoint(tmp_path), ids()))
    kernel.close()
    print("MXFP4", f"{error:.1e}")
    assert error < LIMIT
