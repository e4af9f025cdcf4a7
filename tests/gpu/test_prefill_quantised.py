"""Prefill of quantised weights: expanded weights are the definition, and logits those of CPU ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kog_dist.bench.shapes import DENSE
from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import Coding
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.formats.rounding import rounded
from kog_dist.model.formats.weight_format import CodedMatrix
from kog_dist.model.layout import layer_prefix, tensor_layouts
from kog_dist.model.published_config import read_config
from kog_dist.model.written_checkpoint import write_stored_checkpoint
from kog_dist.workers.cuda.coded_source import codings_of
from kog_dist.workers.cuda.device_weights import from_tensors, needed_rows
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_tensor
from kog_dist.workers.prefill.expand.expanded import expanded_on_gpu
from kog_dist.workers.prefill.gpu import matrices_for, prefill_for
from tests.gpu.test_families import on_cpu
from tests.gpu.test_prefill import logits_of_prompt, relative_error
from tests.unit.test_coded_twin import DENSE as SMALL
from tests.unit.test_coded_twin import FORMS

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT, TOKENS, CACHED = 2, 4096, 128, 40, 17
LIMIT = 4e-3  # as of 16-bit weights, of models with one stream; a wrong scale or code is 1e-1


@pytest.mark.parametrize("form_name", FORMS)
def test_expanded_weights_are_the_definition(form_name: str) -> None:
    import cupy

    form, spec = FORMS[form_name], SMALL
    shape = KernelShape(spec, range(spec.num_lanes), coding=Coding.of(form))
    generator, coded = np.random.default_rng(3), dict[tuple[str, int], CodedMatrix]()

    def codes(name: str, lane: int) -> Codes:
        values = generator.standard_normal(tensor_layouts(spec)[name].shape[1:], np.float32)
        coded[name, lane] = rounded(values, form)
        return Codes.of(coded[name, lane], cupy.asarray)

    weights = from_tensors(shape, lambda name: random_tensor(spec, name, 5)[slice(*needed_rows(shape, name))], codes)
    layers = expanded_on_gpu(shape, weights, [None] * spec.num_layers)
    for layer, found in enumerate(layers):
        for name, parts in (
            ("wqkv", ("attention.wq", "attention.wk", "attention.wv")), ("wo", ("attention.wo",)),
            ("w13", ("feed_forward.w1", "feed_forward.w3")), ("w2", ("feed_forward.w2",)),
        ):  # fmt: skip
            tensors = [f"{layer_prefix(layer)}{part}.weight" for part in parts]
            lanes = [np.concatenate([coded[tensor, lane].values() for tensor in tensors]) for lane in range(spec.num_lanes)]
            got = getattr(found, name).get()
            assert np.array_equal(got.view(np.uint16), np.stack(lanes).astype(np.float16).view(np.uint16)), name


@pytest.mark.parametrize(
    ("shape", "quantize", "quantize_head"),
    [
        ("llama-3.2-1b", "fp8", "none"),
        ("qwen3-4b", "int4", "none"),
        ("qwen3-4b", "int4", "int8"),
        ("llama-3.2-1b", "none", "int8"),
    ],
)
def test_logits_after_prefill_are_those_of_cpu_ranks(tmp_path: Path, shape: str, quantize: str, quantize_head: str) -> None:
    config = {**DENSE[shape], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    spec = read_config(config)
    write_stored_checkpoint(tmp_path, spec, lambda name: random_tensor(spec, name, 5).get(), max_shard_bytes=2**30)
    checkpoint = open_checkpoint(tmp_path, quantize=quantize, quantize_head=quantize_head)
    made = KernelShape(
        checkpoint.spec, range(checkpoint.spec.num_lanes), weight_dtype=checkpoint.dtype, kv_dtype="float16",
        **codings_of(checkpoint),
    )  # fmt: skip
    matrices, observe = matrices_for(made)
    kernel = Monokernel(made, load_weights(made, checkpoint, observe))
    prefill = prefill_for(kernel, matrices)
    ids: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist()
    logits = logits_of_prompt(kernel, prefill, ids, CACHED)
    wanted = on_cpu(checkpoint, ids)
    kernel.close()
    errors = {name: relative_error(found, wanted) for name, found in logits.items()}
    print(shape, quantize, quantize_head, {name: f"{error:.1e}" for name, error in errors.items()})
    assert np.array_equal(logits["whole"].view(np.uint32), logits["behind a kept prefix"].view(np.uint32))
    assert max(errors.values()) < LIMIT
