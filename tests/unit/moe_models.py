"""Small random models with experts, as transformers writes them, and what it makes of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 320}
ROUTER_SCALE = 3.0  # of logits: margins between experts as trained routers have


def qwen3_moe(**changes: Any) -> Any:
    """A config of Qwen3 with experts; four lanes."""
    sizes = {
        "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64,
        "moe_intermediate_size": 24, "num_experts": 10, "num_experts_per_tok": 3, "norm_topk_prob": True,
    }  # fmt: skip
    return Qwen3MoeConfig(**(SIZES | sizes | changes))


CONFIGS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, qwen3_moe()),
    "qwen3_moe, weights of all experts": (Qwen3MoeForCausalLM, qwen3_moe(norm_topk_prob=False, tie_word_embeddings=True)),
    "qwen3_moe, one expert, biases": (Qwen3MoeForCausalLM, qwen3_moe(num_experts_per_tok=1, attention_bias=True)),
    "qwen3_moe, all experts": (
        Qwen3MoeForCausalLM,
        qwen3_moe(num_experts=4, num_experts_per_tok=4),
    ),
}


class Reference(NamedTuple):
    """What transformers makes of a prompt: logits (positions, vocabulary); of every layer the router's (positions, experts) and
    the numbers of those chosen (positions, K), ascending.
    """

    logits: NDArray[np.float64]
    router: list[NDArray[np.float64]]
    chosen: list[NDArray[np.int64]]


def made(name: str, folder: Path) -> Any:
    """Write a model of CONFIGS into a folder in bfloat16; the same model in float64."""
    kind, config = CONFIGS[name]
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
