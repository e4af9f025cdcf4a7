"""Families at their real width, few layers, random weights: kernel and prefill against transformers and CPU ranks."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kog_dist.bench.shapes import DENSE
from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.sampling_params import SamplingParams
from kog_dist.workers.cuda.kernel_shape import KernelShape
from kog_dist.workers.cuda.load import load_weights
from kog_dist.workers.cuda.monokernel import Monokernel
from kog_dist.workers.prefill.gpu import matrices_for, prefill_for
from tests.gpu.test_prefill import begin_at_head, decode, fill, relative_error

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(300)]
LAYERS, VOCABULARY, CONTEXT = 3, 8192, 1024
LENGTHS = (9, 700)  # of prompts
# A cache of binary16, so that its roundings, which transformers does not make, are small. A wrong rope, norm or bias is 1e-1.
LIMIT, PREFILL_LIMIT, CPU_LIMIT = 2e-3, 3e-3, 1e-3
SHAPES = ("llama-3.1-8b", "mistral-7b", "qwen2.5-coder-7b", "qwen3-0.6b", "qwen3-4b", "llama-3.2-1b, llama3 rope")
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def written(folder: Path, shape: str) -> Any:
    """A folder as transformers writes it, and the model in float32 on the GPU, of the same bfloat16 weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = {
        **DENSE[shape.split(",")[0]], "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT
    }  # fmt: skip
    if "llama3 rope" in shape:
        config["rope_scaling"] = LLAMA3
    torch.manual_seed(7)
    with torch.device("cuda"):
        make: Any = AutoModelForCausalLM.from_config
        model = make(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="eager").cuda().eval()  # rotary frequencies in float32, too


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers_and_of_cpu_ranks(tmp_path: Path, shape: str) -> None:
    pytest.importorskip("transformers")
    model = written(tmp_path, shape)
    ids: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, max(LENGTHS)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor([ids], device="cuda")).logits[0].cpu().double().numpy()
    del model
    gc.collect()
    torch.cuda.empty_cache()
    checkpoint = open_checkpoint(tmp_path)
    made = KernelShape(checkpoint.spec, range(checkpoint.spec.num_lanes), weight_dtype=checkpoint.dtype, kv_dtype="float16")
    matrices, observe = matrices_for(made)
    kernel = Monokernel(made, load_weights(made, checkpoint, observe))
    prefill, errors = prefill_for(kernel, matrices), dict[str, float]()
    for length in LENGTHS:
        row = wanted[length - 1]
        errors[f"{length} decoded"] = relative_error(decode(kernel, ids[:length], 0), row)
        fill(prefill, ids[:length])
        errors[f"{length} prefilled"] = relative_error(begin_at_head(kernel, prefill, ids[:length]), row)
    by_cpu = on_cpu(checkpoint, ids[: LENGTHS[0]])
    errors["CPU ranks"] = relative_error(decode(kernel, ids[: LENGTHS[0]], 0), by_cpu)
    print(shape, f"{made.num_lanes} lanes", {name: f"{error:.1e}" for name, error in errors.items()})
    for name, error in errors.items():
        assert error < (CPU_LIMIT if name == "CPU ranks" else PREFILL_LIMIT if "prefilled" in name else LIMIT), name
    kernel.close()


def on_cpu(checkpoint: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Logits of the last of `ids`, by the definition."""
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes))
    engine = Interpreter(make_plan(checkpoint.spec, 1), 0, weights, None, kv_dtype="float16")
    for position, token in enumerate(ids):
        output = engine.step(token, position, SamplingParams(), gather_logits=True)
    assert output.logits is not None
    return output.logits
