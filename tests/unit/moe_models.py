"""Small random models with experts, as transformers writes them, and what it makes of a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.unit.formats.folders import save

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 320}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 80,
}  # fmt: skip
ROUTER_SCALE = 3.0  # of logits: margins between experts as trained routers have


def qwen3_moe(**changes: Any) -> Any:
    """A config of Qwen3 with experts; four lanes."""
    sizes = {
        "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64,
        "moe_intermediate_size": 24, "num_experts": 10, "num_experts_per_tok": 3, "norm_topk_prob": True,
    }  # fmt: skip
    return Qwen3MoeConfig(**(SIZES | sizes | changes))


def gpt_oss(**changes: Any) -> Any:
    """A config of gpt-oss; four lanes."""
    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 96,
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 37, "rope_parameters": YARN,
    }  # fmt: skip
    return GptOssConfig(**(SIZES | sizes | changes))


CONFIGS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe()),
    "qwen3_moe, weights of all experts": (Qwen3MoeForCausalLM, qwen3_moe(norm_topk_prob=False, tie_word_embeddings=True)),
    "qwen3_moe, one expert, biases": (Qwen3MoeForCausalLM, qwen3_moe(num_experts_per_tok=1, attention_bias=True)),
    "qwen3_moe, all experts": (
        Qwen3MoeForCausalLM,
        qwen3_moe(num_experts=4, num_experts_per_tok=4),
    ),
    "gpt_oss": (GptOssForCausalLM, gpt_oss()),
    "gpt_oss, tied, clamped": (
        GptOssForCausalLM,
        gpt_oss(tie_word_embeddings=True, swiglu_limit=0.8, swiglu_alpha=1.3, num_hidden_layers=2),
    ),
    "gpt_oss, no biases of attention, full": (
        GptOssForCausalLM,
        gpt_oss(attention_bias=False, layer_types=["full_attention"] * 3, num_key_value_heads=8),
    ),
}


def in_mxfp4() -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A config of gpt-oss, random tensors as published ones are, and the values that transformers finds in them.

    Each of four lanes has 48 FFN columns, a group and a half.
    """
    config = gpt_oss(intermediate_size=192, num_hidden_layers=2)
    torch.manual_seed(9)
    model = GptOssForCausalLM(config)
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales).double()
        else:
            scale = ROUTER_SCALE if ".router." in name else 1.0
            noise = scale * torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
            stored[name] = (noise + ("norm" in name)).to(torch.bfloat16)
            values[name] = stored[name].double()
    return config, stored, values


def write_mxfp4(folder: Path, config: Any, stored: dict[str, torch.Tensor]) -> None:
    """A folder with such tensors, in files that part codes from scales."""
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    save(folder, stored, json.loads(config.to_json_string()) | {"quantization_config": said, "dtype": "bfloat16"})


class Reference(NamedTuple):
    """What transformers makes of a prompt: logits (positions, vocabulary); of every layer the router's (positions, experts) and
    the numbers of those chosen (positions, K), ascending.
    """

    logits: NDArray[np.float64]
    router: list[NDArray[np.float64]]
    chosen: list[NDArray[np.int64]]


def made(name: str, folder: Path) -> Any:
    """Write a model of CONFIGS into a folder in bfloat16; the same model in float64."""
    return written(*CONFIGS[name], folder)


def written(kind: Any, config: Any, folder: Path) -> Any:
    """Write a random model of a config in bfloat16; the same model in float64."""
    torch.manual_seed(7)
    model = kind(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if "norm" in key:
                parameter.copy_(1 + 0.2 * noise)
            elif key.endswith(("bias", "sinks")):
                parameter.copy_(noise)
            else:
                scale = ROUTER_SCALE if ".gate." in key or ".router." in key else 1.0
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    return loaded(kind, folder)


def loaded(kind: Any, folder: Path) -> Any:
    """The model of a folder in float64, computed the plain way."""
    return kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()  # fmt: skip


def plain(kind: Any, config: Any) -> Any:
    """A model in float64, computed the plain way, whose weights are to be loaded."""
    return kind._from_config(config, attn_implementation="eager", experts_implementation="eager").double().eval()


def reference(model: Any, prompt: list[int]) -> Reference:
    """What a model of transformers makes of a prompt."""
    seen: list[tuple[Any, ...]] = []
    gates = [layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _module, _inputs, output: seen.append(output)) for gate in gates]
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0].numpy()
    for hook in hooks:
        hook.remove()
    return Reference(logits, [out[0].numpy() for out in seen], [np.sort(out[2].numpy(), axis=1) for out in seen])
