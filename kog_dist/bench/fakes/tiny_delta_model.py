"""A model with gated delta nets that decodes in milliseconds: a folder as of Qwen3.5, random weights, every byte a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.fakes.tiny_model import EOS_ID
from kog_dist.late_numpy import Array
from kog_dist.model.published_config import read_config
from kog_dist.model.safetensors_file import narrow, write_safetensors
from kog_dist.model.spec import ModelSpec

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "vocab_size": EOS_ID + 1,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attn_output_gate": True,
    "tie_word_embeddings": False, "torch_dtype": "float32", "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
}  # fmt: skip

# Changes: experts beside a shared one, all in one tensor as in Qwen3.5's files.
WITH_EXPERTS: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_experts": 16, "num_experts_per_tok": 3,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
}  # fmt: skip
ON_GPUS: Final[dict[str, Any]] = {"head_dim": 64, "torch_dtype": "bfloat16"}  # changes: lanes of both kinds give as many values


def write_tiny_delta_model(folder: Path, *, seed: int = 1, **changes: Any) -> ModelSpec:
    """Write it with a tokenizer into a new folder. `changes`: of `CONFIG`."""
    config = CONFIG | changes
    dtype = {"float32": "F32", "bfloat16": "BF16"}[config["torch_dtype"]]
    rng, d, ffn = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    keys, values = config["linear_num_key_heads"] * config["linear_key_head_dim"], value_heads * value_dim
    heads, kv_heads, head_dim = (config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors: dict[str, Array] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((rows, columns)) * columns**-0.5

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 0.1 * rng.standard_normal(d)
        if (layer + 1) % config["full_attention_interval"]:
            net = f"{prefix}linear_attn."
            for name, rows in (("qkv", 2 * keys + values), ("z", values), ("a", value_heads), ("b", value_heads)):
                matrix(f"{net}in_proj_{name}", rows, d)
            matrix(f"{net}out_proj", d, values)
            taps = (2 * keys + values, 1, config["linear_conv_kernel_dim"])
            tensors[f"{net}conv1d.weight"] = 0.5 * rng.standard_normal(taps)
            tensors[f"{net}A_log"], tensors[f"{net}dt_bias"] = rng.random(value_heads), rng.random(value_heads) - 3
            tensors[f"{net}norm.weight"] = 1 + 0.1 * rng.standard_normal(value_dim)
        else:
            own = f"{prefix}self_attn."
            matrix(f"{own}q_proj", 2 * heads * head_dim, d)
            matrix(f"{own}k_proj", kv_heads * head_dim, d)
            matrix(f"{own}v_proj", kv_heads * head_dim, d)
            matrix(f"{own}o_proj", d, heads * head_dim)
            for name in ("q_norm", "k_norm"):
                tensors[f"{own}{name}.weight"] = 0.1 * rng.standard_normal(head_dim)
        module = "mlp."
        if "num_experts" in config:
            count, width, module = config["num_experts"], config["moe_intermediate_size"], "mlp.shared_expert."
            ffn = config["shared_expert_intermediate_size"]
            matrix(f"{prefix}mlp.gate", count, d)
            matrix(f"{prefix}mlp.shared_expert_gate", 1, d)
            for name, rows, columns in (("gate_up_proj", 2 * width, d), ("down_proj", d, width)):
                stack = rng.standard_normal((count, rows, columns)) * columns**-0.5
                tensors[f"{prefix}mlp.experts.{name}"] = stack
        for name, rows, columns in (("gate_proj", ffn, d), ("up_proj", ffn, d), ("down_proj", d, ffn)):
            matrix(f"{prefix}{module}{name}", rows, columns)
    matrix("model.embed_tokens", config["vocab_size"], d)
    matrix("lm_head", config["vocab_size"], d)
    tensors["model.norm.weight"] = 0.1 * rng.standard_normal(d)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored = {name: (dtype, made.shape, narrow(made, dtype)) for name, made in tensors.items()}
    write_safetensors(folder / "model.safetensors", stored)
    write_tokenizer(folder, config["vocab_size"])
    return read_config(config)
