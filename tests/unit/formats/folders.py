"""Small random folders with quantised weights, and models of transformers with the values that their library finds in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kog_dist.decode.cpu.interpreter import Interpreter
from kog_dist.decode.plan.plan import make_plan
from kog_dist.decode.plan.validate import check
from kog_dist.model.checkpoint import Checkpoint
from kog_dist.sampling_params import SamplingParams
from tests.unit.formats.writers import METHODS, Method

SIZES: dict[str, Any] = {
    "vocab_size": 97, "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 256, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=32)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Made(NamedTuple):
    """A folder, its tensors, and transformers' model in float64 with the same weights."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    model: Any


def made(folder: Path, method: Method | str, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Made:
    """With all projections quantised, in two files: some modules have their codes in one and their scales in the other."""
    method = METHODS[method] if isinstance(method, str) else method
    kind, config = FAMILIES[family]
    torch.manual_seed(11)
    model = kind(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.2))
            if "norm" in name:
                parameter.add_(1)
    tensors = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight" or family == "llama"
    }
    reference = kind(config).double().eval()
    values = {name: tensor.double() for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith(".weight") and name.split(".")[-2] in PROJECTIONS]:
        written = method.write(tensors.pop(name))
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{end}": tensor.contiguous() for end, tensor in written.tensors.items()}
        values[name] = written.values.double()
    missing, unexpected = reference.load_state_dict(values, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    reference.tie_weights()
    save(folder, tensors, json.loads(config.to_json_string()) | {"quantization_config": method.config, "dtype": str(dtype)[6:]})
    return Made(folder, tensors, reference)


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))


def logits(checkpoint: Checkpoint, prompt: list[int], dtype: type = np.float64) -> np.ndarray[Any, Any]:
    """Of every position, from the interpreter."""
    weights = checkpoint.rank_weights(range(checkpoint.spec.num_lanes), dtype=dtype)
    plan = make_plan(checkpoint.spec, 1)
    check(plan)
    engine = Interpreter(plan, 0, weights, None, dtype=dtype, kv_dtype=np.dtype(dtype).name)
    rows = []
    for position, token in enumerate(prompt):
        output = engine.step(token, position, SamplingParams(), gather_logits=True)
        assert output.logits is not None
        rows.append(output.logits.copy())
    return np.stack(rows)


def expected_logits(model: Any, prompt: list[int]) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].numpy()  # type: ignore[no-any-return]
