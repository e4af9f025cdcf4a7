"""Keys of a `config.json` that families refuse: each changes the logits of a model of transformers that has it."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kog_dist.model.families.computation import COMPUTATION, INERT, OF_EXPERTS

SIZES: dict[str, Any] = {
    "vocab_size": 33, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
MOE = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
DEEPSEEK = {key: value for key, value in SIZES.items() if key != "head_dim"} | {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
}  # fmt: skip
FALCON = {key: value for key, value in SIZES.items() if key != "head_dim"}
GRANITE_HYBRID = SIZES | {
    "num_local_experts": 0, "layer_types": ["attention"] * 2, "shared_intermediate_size": 24, "mamba_n_heads": 4,
}  # fmt: skip
ERNIE = SIZES | {"moe_k": 1, "moe_intermediate_size": 16, "moe_layer_start_index": 0, "moe_layer_end_index": 1}
LLAMA4 = SIZES | {"intermediate_size_mlp": 24}
GEMMA = SIZES | {"sliding_window": 64}
GPT = {"vocab_size": 33, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
# Key -> model type, the rest of its config, a value, and another with which its logits are others.
CASES: dict[str, tuple[str, dict[str, Any], Any, Any]] = {
    "attention_bias": ("llama", SIZES, False, True),
    "mlp_bias": ("llama", SIZES, False, True),
    "hidden_act": ("llama", SIZES, "silu", "gelu"),
    "logits_scaling": ("granite", SIZES, 1.0, 8.0),
    "embedding_multiplier": ("granite", SIZES, 1.0, 12.0),
    "residual_multiplier": ("granite", SIZES, 1.0, 0.22),
    "attention_multiplier": ("granite", SIZES, 8**-0.5, 0.1),
    "norm_topk_prob": ("qwen3_moe", MOE, True, False),
    "qkv_bias": ("qwen2_moe", MOE, False, True),
    "use_qkv_bias": ("stablelm", SIZES, False, True),
    "attention_out_bias": ("seed_oss", SIZES, False, True),
    "use_bias": ("starcoder2", SIZES, False, True),
    "bias": ("falcon", FALCON, False, True),
    "use_qk_norm": ("cohere", SIZES, False, True),
    "qk_layernorm": ("stablelm", SIZES, False, True),
    "attn_logit_softcapping": ("gemma2", GEMMA, None, 1.0),
    "final_logit_softcapping": ("gemma2", GEMMA, None, 1.0),
    "query_pre_attn_scalar": ("gemma2", GEMMA, 8, 99),
    "sliding_window": ("mistral", SIZES, None, 3),
    "use_sliding_window": ("qwen2", SIZES | {"sliding_window": 3, "max_window_layers": 0}, False, True),
    "layer_types": ("gemma2", SIZES | {"sliding_window": 3}, ["full_attention"] * 2, ["sliding_attention"] * 2),
    "hidden_activation": ("gemma2", GEMMA, "silu", "gelu"),
    "use_bidirectional_attention": ("gemma3_text", GEMMA, False, True),
    "attn_temperature_tuning": (
        "llama4_text",
        SIZES | {"floor_scale": 2, "num_local_experts": 2, "intermediate_size_mlp": 24, "no_rope_layers": [0, 0]},
        False,
        True,
    ),
    "attention_chunk_size": (
        "llama4_text",
        SIZES | {"num_local_experts": 2, "intermediate_size_mlp": 24, "no_rope_layers": [1, 1]},
        64,
        3,
    ),
    "num_local_experts": (
        "llama4_text",
        SIZES | {"intermediate_size_mlp": 24, "no_rope_layers": [1, 1], "interleave_moe_layer_step": 1},
        1,
        3,
    ),
    "interleave_moe_layer_step": (
        "llama4_text",
        SIZES | {"num_local_experts": 2, "intermediate_size_mlp": 24, "no_rope_layers": [1, 1]},
        1,
        2,
    ),
    "no_rope_layers": ("smollm3", SIZES, [1, 1], [1, 0]),
    "no_rope_layer_interval": ("smollm3", SIZES, 8, 2),
    "attention_k_eq_v": ("gemma4_text", GEMMA, False, True),
    "clip_qkv": ("olmo", SIZES, None, 0.1),
    "kv_lora_rank": ("deepseek_v3", DEEPSEEK, 8, 4),
    "q_lora_rank": ("deepseek_v3", DEEPSEEK, None, 4),
    "index_topk": ("deepseek_v32", DEEPSEEK | {"q_lora_rank": 4, "index_n_heads": 2, "index_head_dim": 8}, 64, 2),
    "num_kv_shared_layers": ("gemma3n_text", GEMMA, 0, 1),
    "v_head_dim": ("deepseek_v3", DEEPSEEK, 8, 4),
    "attention_value_scale": ("mimo_v2_flash", MOE | {"v_head_dim": 8}, 1.0, 0.7),
    "key_multiplier": ("falcon_h1", SIZES, 1.0, 0.5),
    "attention_in_multiplier": ("falcon_h1", SIZES, 1.0, 0.5),
    "attention_out_multiplier": ("falcon_h1", SIZES, 1.0, 0.5),
    "lm_head_multiplier": ("falcon_h1", SIZES, 1.0, 0.5),
    "mlp_multipliers": ("falcon_h1", SIZES, [1.0, 1.0], [0.5, 2.0]),
    "attention_window_size": ("recurrent_gemma", SIZES | {"block_types": ["attention", "attention"], "lru_width": 32}, 64, 3),
    "logits_soft_cap": ("recurrent_gemma", SIZES | {"block_types": ["attention", "attention"], "lru_width": 32}, 100.0, 1.0),
    "sliding_window_size": ("inkling_text", SIZES, 64, 3),
    "layers_block_type": ("nemotron_h", SIZES, ["full_attention"] * 2, ["full_attention", "mlp"]),
    "num_attention_heads_per_layer": ("laguna", MOE, [4, 4], [4, 2]),
    "per_layer_config": ("gemma4_text", GEMMA, {}, {"01": {"head_dim": 16}}),
    "partial_rotary_factor": ("stablelm", SIZES, 1.0, 0.5),
    "rotary_dim": ("gptj", GPT, 8, 4),
    "rope_interleave": ("deepseek_v3", DEEPSEEK, False, True),
    "alibi": ("falcon", FALCON, False, True),
    "parallel_attn": ("falcon", FALCON | {"new_decoder_architecture": False}, False, True),
    "activation": ("falcon", FALCON, "silu", "gelu"),
    "layer_rope_theta": ("granite_swa", SIZES, [1e4, 1e4], [1e4, 1e2]),
    "position_embedding_type": (
        "granitemoehybrid",
        SIZES | {"num_local_experts": 0, "layer_types": ["attention"] * 2, "shared_intermediate_size": 24, "mamba_n_heads": 4},
        "rope",
        None,
    ),
    "activation_function": ("gpt2", GPT, "silu", "gelu"),
    "swiglu_alpha": ("gpt_oss", SIZES | {"num_local_experts": 2, "num_experts_per_tok": 2}, 1.702, 1.0),
    "swiglu_limit": ("gpt_oss", SIZES | {"num_local_experts": 2, "num_experts_per_tok": 2}, 7.0, 0.1),
    "num_experts": ("qwen3_moe", MOE | {"num_experts_per_tok": 1}, 1, 4),
    "n_routed_experts": ("deepseek_v3", DEEPSEEK, 2, 4),
    "moe_num_experts": (
        "ernie4_5_moe",
        SIZES | {"moe_k": 1, "moe_intermediate_size": 16, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
        2,
        4,
    ),
    "enable_moe_block": ("gemma4_text", GEMMA | {"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 16}, False, True),
    "scale_emb": ("minicpm3", DEEPSEEK | {"q_lora_rank": 4}, 1, 12),
    "scale_depth": ("minicpm3", DEEPSEEK | {"q_lora_rank": 4}, 2**0.5, 1.4),
    "dim_model_base": ("minicpm3", DEEPSEEK | {"q_lora_rank": 4}, 32, 8),
    "embedding_scale": ("hrm_text", SIZES, 1.0, 50.0),
    "scale_embedding": ("biogpt", SIZES, False, True),
    "mup_enabled": ("afmoe", MOE | {"num_dense_layers": 1}, False, True),
    "route_scale": ("afmoe", MOE | {"num_dense_layers": 1}, 1.0, 2.0),
    "num_dense_layers": ("afmoe", MOE, 0, 1),
    "num_shared_experts": ("exaone_moe", MOE | {"mlp_layer_types": ["sparse"] * 2, "n_group": 1, "topk_group": 1}, 1, 2),
    "use_post_norm": ("hyperclovax", SIZES, False, True),
    "use_parallel_residual": ("gpt_neox", SIZES, False, True),
    "rotary_pct": ("gpt_neox", SIZES, 1.0, 0.25),
    "hidden_size_per_layer_input": ("gemma4_text", GEMMA, 0, 8),
    "hc_mult": ("deepseek_v4", SIZES, 1, 2),
    "logit_scale": ("cohere", SIZES, 1.0, 0.0625),
    "lm_head_bias": ("phimoe", SIZES | {"num_local_experts": 2}, False, True),
    "first_k_dense_replace": ("deepseek_v3", DEEPSEEK, 0, 1),
    "mlp_only_layers": ("qwen3_moe", MOE, [], [0]),
    "decoder_sparse_step": ("qwen3_moe", MOE, 1, 2),
    "n_group": ("deepseek_v3", DEEPSEEK | {"num_experts_per_tok": 1, "n_routed_experts": 8}, 1, 4),
    "topk_group": ("deepseek_v3", DEEPSEEK | {"n_group": 4, "n_routed_experts": 8}, 4, 1),
    "shared_expert_intermediate_size": ("qwen2_moe", MOE, 8, 16),
    "n_shared_experts": ("deepseek_v3", DEEPSEEK, 1, 2),
    "routed_scaling_factor": ("deepseek_v3", DEEPSEEK, 1.0, 2.5),
    "moe_routed_scaling_factor": ("laguna", MOE, 1.0, 2.5),
    "moe_router_logit_softcapping": ("laguna", MOE, 0.0, 1.0),
    "mlp_layer_types": ("laguna", MOE, ["sparse", "sparse"], ["dense", "sparse"]),
    "scoring_func": ("inkling2_text", SIZES | {"n_routed_experts": 8, "num_experts_per_tok": 2}, "sigmoid", "tanh"),
    "topk_method": (
        "deepseek_v2",
        DEEPSEEK | {"n_group": 4, "topk_group": 1, "n_routed_experts": 8},
        "greedy",
        "group_limited_greedy",
    ),
}
SAID_OTHERWISE = {"quantization_config"}  # how tensors are read (formats)


def logits(model_type: str, config: dict[str, Any]) -> torch.Tensor:
    """Of a model whose parameters follow from their names, biases and norms included."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config)).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                buffer.zero_()
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        return model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])).logits  # type: ignore[no-any-return]


@pytest.mark.service  # builds two models of each of 40 architectures, and changes with transformers alone
@pytest.mark.parametrize("key", CASES)
def test_each_key_changes_the_logits_of_a_model_that_has_it(key: str) -> None:
    model_type, config, value, other = CASES[key]
    one, two = (logits(model_type, config | {key: given}) for given in (value, other))
    assert torch.isfinite(one).all()
    assert not torch.allclose(one, two, atol=1e-4)


def test_every_key_is_tried_and_none_is_inert() -> None:
    assert {*COMPUTATION, *OF_EXPERTS} == {*CASES, *SAID_OTHERWISE}
    assert not INERT & {*COMPUTATION, *OF_EXPERTS}


def test_the_size_of_heads_is_the_model_s_own_where_it_says_one() -> None:
    config = {"hidden_size": 32, "num_attention_heads": 4}
    for key, own, computed in (("query_pre_attn_scalar", 16, 8), ("attention_multiplier", 0.25, 8**-0.5)):
        values = COMPUTATION[key]
        assert callable(values)
        assert values(config | {"head_dim": 16}) == (own,)
        assert values(config) == (computed,)
