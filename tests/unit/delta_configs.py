"""Configs of published models with gated delta nets, as their folders have them but for names of tools."""

from __future__ import annotations

from typing import Any

from kog_dist.model.published_config import read_config
from kog_dist.model.spec import ModelSpec

VOCABULARY, CONTEXT = 4096, 512  # of models of few layers

_NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
_ROPE = {
    "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
}  # fmt: skip
_COMMON: dict[str, Any] = {
    **_NET, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "mamba_ssm_dtype": "float32",
    "full_attention_interval": 4, "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rope_parameters": _ROPE,
    "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip


def _wrapped(model_type: str, **text: Any) -> dict[str, Any]:
    layers = text["num_hidden_layers"]
    kinds = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    return {
        "architectures": [f"Qwen3_5{'Moe' if 'moe' in model_type else ''}ForConditionalGeneration"], "model_type": model_type,
        "image_token_id": 248_056, "video_token_id": 248_057, "vision_start_token_id": 248_053, "vision_end_token_id": 248_054,
        "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0", "vision_config": {"depth": 27, "hidden_size": 1152},
        "text_config": {**_COMMON, "model_type": f"{model_type}_text", "layer_types": kinds, **text},
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3.5-35B-A3B": _wrapped(
        "qwen3_5_moe", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
        linear_num_value_heads=32, moe_intermediate_size=512, shared_expert_intermediate_size=512, num_experts=256,
        num_experts_per_tok=8, router_aux_loss_coef=0.001, output_router_logits=False, mlp_only_layers=[],
    ),
    "Qwen3.5-27B": _wrapped(
        "qwen3_5", hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48, intermediate_size=17_408,
    ),
    "Qwen3.8-27B": _wrapped(
        "qwen3_5", hidden_size=5120, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4,
        linear_num_value_heads=48, intermediate_size=17_408, output_gate_type="swish",
    ),
    "Qwen3.5-9B": _wrapped(
        "qwen3_5", hidden_size=4096, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4,
        linear_num_value_heads=32, intermediate_size=12_288,
    ),
    "Qwen3.5-4B": _wrapped(
        "qwen3_5", hidden_size=2560, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4,
        linear_num_value_heads=32, intermediate_size=9216, tie_word_embeddings=True,
    ) | {"tie_word_embeddings": True},
    "Qwen3.5-2B": _wrapped(
        "qwen3_5", hidden_size=2048, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        linear_num_value_heads=16, intermediate_size=6144, tie_word_embeddings=True,
    ) | {"tie_word_embeddings": True},
    "Qwen3.5-397B-A17B": _wrapped(
        "qwen3_5_moe", hidden_size=4096, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=2,
        linear_num_value_heads=64, moe_intermediate_size=1024, shared_expert_intermediate_size=1024, num_experts=512,
        num_experts_per_tok=10, router_aux_loss_coef=0.001, output_router_logits=False, mlp_only_layers=[],
    ),
    "Qwen3.5-122B-A10B": _wrapped(
        "qwen3_5_moe", hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=2,
        linear_num_value_heads=64, moe_intermediate_size=1024, shared_expert_intermediate_size=1024, num_experts=256,
        num_experts_per_tok=8, router_aux_loss_coef=0.001, output_router_logits=False, mlp_only_layers=[],
    ),
    "Qwen3.5-0.8B": _wrapped(
        "qwen3_5", hidden_size=1024, num_hidden_layers=24, num_attention_heads=8, num_key_value_heads=2,
        linear_num_value_heads=16, intermediate_size=3584, tie_word_embeddings=True,
    ) | {"tie_word_embeddings": True},
    "Qwen3-Next-80B-A3B": {
        **_NET, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 32, "vocab_size": 151_936,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 10_000_000, "rope_scaling": None,
        "max_position_embeddings": 262_144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "use_cache": True, "use_sliding_window": False,
    },
}  # fmt: skip
CONFIGS["Qwen3-Coder-Next"] = CONFIGS["Qwen3-Next-80B-A3B"] | {"rope_theta": 5_000_000}


def few_layers(name: str, **others: Any) -> ModelSpec:
    """A published shape with three delta nets and one layer of attention; with experts, which are large, one of each."""
    config = {**CONFIGS[name], **others}
    text = config.get("text_config", config)
    count = 2 if "num_experts" in text else 4
    few = {"num_hidden_layers": count, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    few |= {"layer_types": text["layer_types"][-count:]} if "layer_types" in text else {"full_attention_interval": count}
    return read_config({**config, "text_config": {**text, **few}} if "text_config" in config else {**config, **few})
