"""A model with gated delta nets that decodes in milliseconds: a folder as of Qwen3.5, random weights, every byte a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kog_dist.bench.fakes.made_tokenizer import write_tokenizer
from kog_dist.bench.fakes.tiny_model import EOS_ID
from kog_dist.model.published_config import read_config
from kog_dist.model.safetensors_file import narrow, write_safetensors
from kog_dist.model.spec import ModelSpec

_D, _HEADS, _KV_HEADS, _HEAD_DIM, _KEY_HEADS, _VALUE_HEADS, _DIM, _FFN, _LAYERS, _TAPS = 32, 4, 2, 16, 4, 8, 32, 64, 4, 4
CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": _D, "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "head_dim": _HEAD_DIM, "intermediate_size": _FFN,
    "linear_num_key_heads": _KEY_HEADS, "linear_num_value_heads": _VALUE_HEADS, "linear_key_head_dim": _DIM,
    "linear_value_head_dim": _DIM, "linear_conv_kernel_dim": _TAPS, "full_attention_interval": 4, "vocab_size": EOS_ID + 1,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attn_output_gate": True,
    "tie_word_embeddings": False, "torch_dtype": "float32", "mamba_ssm_dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000, "partial_rotary_factor": 0.5},
}  # fmt: skip


def write_tiny_delta_model(folder: Path, *, seed: int = 1) -> ModelSpec:
    """Write it with a tokenizer into a new folder."""
    rng, keys, values = np.random.default_rng(seed), _KEY_HEADS * _DIM, _VALUE_HEADS * _DIM
    tensors: dict[str, NDArray[Any]] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((rows, columns)) * columns**-0.5

    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 0.1 * rng.standard_normal(_D)
        if (layer + 1) % CONFIG["full_attention_interval"]:
            net = f"{prefix}linear_attn."
            for name, rows in (("qkv", 2 * keys + values), ("z", values), ("a", _VALUE_HEADS), ("b", _VALUE_HEADS)):
                matrix(f"{net}in_proj_{name}", rows, _D)
            matrix(f"{net}out_proj", _D, values)
            tensors[f"{net}conv1d.weight"] = 0.5 * rng.standard_normal((2 * keys + values, 1, _TAPS))
            tensors[f"{net}A_log"], tensors[f"{net}dt_bias"] = rng.random(_VALUE_HEADS), rng.random(_VALUE_HEADS) - 3
            tensors[f"{net}norm.weight"] = 1 + 0.1 * rng.standard_normal(_DIM)
        else:
            own = f"{prefix}self_attn."
            matrix(f"{own}q_proj", 2 * _HEADS * _HEAD_DIM, _D)
            matrix(f"{own}k_proj", _KV_HEADS * _HEAD_DIM, _D)
            matrix(f"{own}v_proj", _KV_HEADS * _HEAD_DIM, _D)
            matrix(f"{own}o_proj", _D, _HEADS * _HEAD_DIM)
            for name in ("q_norm", "k_norm"):
                tensors[f"{own}{name}.weight"] = 0.1 * rng.standard_normal(_HEAD_DIM)
        for name, rows, columns in (("gate_proj", _FFN, _D), ("up_proj", _FFN, _D), ("down_proj", _D, _FFN)):
            matrix(f"{prefix}mlp.{name}", rows, columns)
    matrix("model.embed_tokens", EOS_ID + 1, _D)
    matrix("lm_head", EOS_ID + 1, _D)
    tensors["model.norm.weight"] = 0.1 * rng.standard_normal(_D)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    stored = {name: ("F32", values.shape, narrow(values, "F32")) for name, values in tensors.items()}
    write_safetensors(folder / "model.safetensors", stored)
    write_tokenizer(folder, EOS_ID + 1)
    return read_config(CONFIG)
