"""Quantised weights on a GPU: the kernel's logits are those of the definition, on CPU ranks or by the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.bench.shapes import DENSE
from kog_dist.decode.coded_packing import Codes
from kog_dist.decode.coding import HEAD_CODING, Coding
from kog_dist.model.checkpoint import Checkpoint, open_checkpoint
from kog_dist.model.formats.head import rounded_rows
from kog_dist.model.formats.weight_format import WeightFormat
from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec
from kog_dist.model.written_checkpoint import write_stored_checkpoint
from kog_dist.workers.cuda.coded_source import coding_of, codings_of
from kog_dist.workers.cuda.device_weights import from_tensors, needed_rows
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.cuda.random_weights import random_tensor
from tests.gpu.test_families import on_cpu
from tests.gpu.test_prefill import decode, relative_error
from tests.unit.test_coded_twin import DENSE as SMALL
from tests.unit.test_coded_twin import FORMS as TWIN_FORMS
from tests.unit.test_coded_twin import CodedModel

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT, TOKENS = 2, 4096, 128, 9
LIMIT = 1e-3  # as of 16-bit weights; a wrong scale or code is 1e-1
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
_INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group"}
FORMS = {**TWIN_FORMS, "FP8, one scale": WeightFormat("E4M3", 0, 0, "F32")}
SPECS = {
    "small": SMALL,
    "llama-3.2-1b": replace(  # a layer of full width, in the lanes of its quantised folders
        read_config(
            {
                **DENSE["llama-3.2-1b"], "num_hidden_layers": 1, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
                "tie_word_embeddings": False,
            }
        ),
        num_lanes=2,
    ),
}  # fmt: skip
# What tests/unit/formats/writers.py writes, with groups that the kernel reads; GPTQ has float16 scales and zero points as AWQ.
FOLDERS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "fp8, blocks": ("fp8_blocks", (128, 128), {}),
    "float-quantized, one scale": ("compressed", ("float-quantized",), {**_FP8, "strategy": "tensor"}),
    "float-quantized, a scale for each row": ("compressed", ("float-quantized",), {**_FP8, "strategy": "channel"}),
    "ModelOpt, one scale": ("modelopt", ("FP8",), {}),
    "ModelOpt, a scale for each row": ("modelopt", ("FP8_PER_CHANNEL_PER_TOKEN",), {}),
    "ModelOpt, blocks": ("modelopt", ("FP8_PB_WO",), {}),
    "FBGEMM": ("fbgemm", (), {}),
    "AWQ": ("awq", (32,), {}),
    "GPTQ": ("gptq", (32,), {}),
    "GPTQ, groups of 128": ("gptq", (128,), {}),
    "pack-quantized": ("compressed", ("pack-quantized",), {**_INT4, "group_size": 32}),
    "pack-quantized, zero points": ("compressed", ("pack-quantized",), {**_INT4, "group_size": 32, "symmetric": False}),
    "pack-quantized, a scale for each row": ("compressed", ("pack-quantized",), {**_INT4, "strategy": "channel"}),
    "MXFP4": (
        "compressed", ("mxfp4-pack-quantized",),
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
    ),
}  # fmt: skip


def made(folder: Path, shape: str, **changes: Any) -> ModelSpec:
    """A checkpoint with random weights of a shape's first layers, and its spec."""
    config = {
        **DENSE[shape],
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        **changes,
    }
    spec = read_config(config)
    write_stored_checkpoint(folder, spec, lambda name: random_tensor(spec, name, 5).get(), max_shard_bytes=2**30)
    return spec


def error_of(checkpoint: Checkpoint, shape: KernelShape) -> float:
    """Of the kernel's logits beside those of a CPU rank."""
    kernel = Monokernel(shape, load_weights(shape, checkpoint))
    ids: list[int] = np.random.default_rng(1).integers(0, checkpoint.spec.vocab_size, TOKENS).tolist()
    error = relative_error(decode(kernel, ids, 0), on_cpu(checkpoint, ids))
    kernel.close()
    return error


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_values_of_codes(form: str, name: str) -> None:
    """As test_coded_twin.py on a CPU: the definition of each format in float64, with keys and values in binary16."""
    import cupy

    spec = SPECS[name]
    with pytest.MonkeyPatch.context() as no_gpu:  # it draws with NumPy in place of cupy
        model = CodedModel(spec, "bfloat16", FORMS[form], no_gpu)
    model.kv_dtype = "float16"
    shape = KernelShape(spec, range(spec.num_lanes), kv_dtype="float16", coding=Coding.of(FORMS[form]))
    weights = from_tensors(
        shape, lambda tensor: cupy.asarray(model.words[tensor][slice(*needed_rows(shape, tensor))]),
        lambda tensor, lane: Codes.of(model.coded[tensor, lane], cupy.asarray),
    )  # fmt: skip
    kernel = Monokernel(shape, weights)
    ids: list[int] = np.random.default_rng(1).integers(0, spec.vocab_size, TOKENS).tolist()
    error = relative_error(decode(kernel, ids, 0), model.logits(ids)[-1])
    kernel.close()
    print(name, form, f"{error:.1e}")
    assert error < LIMIT


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_of_folders_as_libraries_write_them(tmp_path: Path, name: str) -> None:
    for library in ("transformers", "compressed_tensors"):
        pytest.importorskip(library)
    from tests.unit.formats import folders, writers

    writer, arguments, options = FOLDERS[name]
    folders.made(tmp_path, getattr(writers, writer)(*arguments, **options), "qwen3")
    checkpoint = open_checkpoint(tmp_path)
    coding = coding_of(checkpoint)
    assert coding is not None
    lanes = range(checkpoint.spec.num_lanes)
    error = error_of(
        checkpoint, KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype="float16", coding=coding)
    )
    print(name, coding, f"{error:.1e}")
    assert error < LIMIT


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-4b"])
@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_logits_of_weights_that_are_quantised_at_the_start(tmp_path: Path, shape: str, quantize: str) -> None:
    made(tmp_path, shape)
    checkpoint = open_checkpoint(tmp_path, quantize=quantize)
    coding = coding_of(checkpoint)
    assert coding == (Coding("E4M3", 1, "F32") if quantize == "fp8" else Coding("INT4", 1, "BF16"))
    lanes = range(checkpoint.spec.num_lanes)
    error = error_of(
        checkpoint, KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype="float16", coding=coding)
    )
    print(shape, quantize, f"{error:.1e}")
    assert error < LIMIT


# Hidden sizes of whole steps of all warps, and of one and a quarter; tied embeddings but for the last one.
@pytest.mark.parametrize(
    ("shape", "quantize"),
    [("llama-3.2-1b", "none"), ("llama-3.2-1b", "int4"), ("qwen3-4b", "none"), ("qwen3-4b", "fp8"), ("qwen3-8b", "int4")],
)
def test_logits_of_an_lm_head_in_int8(tmp_path: Path, shape: str, quantize: str) -> None:
    made(tmp_path, shape)
    checkpoint = open_checkpoint(tmp_path, quantize=quantize, quantize_head="int8")
    lanes, codings = range(checkpoint.spec.num_lanes), codings_of(checkpoint)
    assert codings["head_coding"] == HEAD_CODING
    error = error_of(
        checkpoint, KernelShape(checkpoint.spec, lanes, weight_dtype=checkpoint.dtype, kv_dtype="float16", **codings)
    )
    print(shape, quantize, "head in INT8", f"{error:.1e}")
    assert error < LIMIT


def test_a_gpu_rounds_an_lm_head_to_the_codes_of_a_cpu() -> None:
    import cupy

    values = np.random.default_rng(2).standard_normal((64, 4096)).astype(np.float32)
    values *= np.float32(2.0) ** np.arange(-52, 12, dtype=np.float32)[:, None]
    values[0], values[1, 5:] = 0, 0
    values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    found, wanted = rounded_rows(cupy.asarray(values)), rounded_rows(values)
    assert found.codes.get().tobytes() == wanted.codes.tobytes()
    assert found.scales.get().tobytes() == wanted.scales.tobytes()
