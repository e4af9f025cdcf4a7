"""Keys of a `config.json` that change what a model computes, with the values of each that change nothing.

A family reads some of them. Of the others any value but these is refused by name, and every key that is not here and that no
family reads is left out. Each changes the logits of some model of transformers (tests/unit/test_computation_keys.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from kog_dist.errors import ConfigError
from kog_dist.model.families.fields import Config
from kog_dist.quoting import short

Values = tuple[object, ...]
Rule = Values | Callable[[Config], Values]


def _named(names: str, values: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), values)


def _size(config: Config, key: str) -> float:
    value = config.get(key)
    return float(value) if (type(value) is int or type(value) is float) and 0 < value < 2**53 else math.nan


def _head_dim(config: Config) -> float:
    own = _size(config, "head_dim")
    return _size(config, "hidden_size") / _size(config, "num_attention_heads") if math.isnan(own) else own


def _windows(config: Config) -> Values:
    """A window that no position can leave, or one that is not used."""
    window = _size(config, "sliding_window")
    unused = config.get("use_sliding_window") is False or window >= _size(config, "max_position_embeddings")
    return (config.get("sliding_window"),) if unused else ()


def all_layers(kind: object) -> Callable[[Config], Values]:
    """A list with `kind` for each layer."""

    def values(config: Config) -> Values:
        layers = _size(config, "num_hidden_layers")
        return () if math.isnan(layers) or layers > 4096 else ([kind] * int(layers),)

    return values


# Keys that transformers, trainers and tools write into every config.json and that change nothing here.
INERT: Final = frozenset(
    """_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version
    use_cache initializer_range attention_dropout hidden_dropout return_dict output_attentions output_hidden_states
    output_router_logits router_aux_loss_coef is_encoder_decoder pad_head_dim_to_multiple_of pretraining_tp max_window_layers
    is_llama_config""".split()
)
_NO: Final = (False, 0)
_SILU: Final = ("silu", "swish")

# Of every family. Null, and empty lists and objects, change nothing anywhere.
COMPUTATION: Final[Mapping[str, Rule]] = {
    # attention
    **_named("attention_bias qkv_bias use_qkv_bias attention_out_bias use_bias bias", _NO),
    **_named("use_qk_norm qk_layernorm", _NO),
    **_named("attn_logit_softcapping attn_temperature_tuning use_bidirectional_attention attention_k_eq_v", _NO),
    **_named("clip_qkv q_lora_rank kv_lora_rank index_topk num_kv_shared_layers", _NO),
    **_named("attention_multiplier", lambda config: (_head_dim(config) ** -0.5,)),
    **_named("query_pre_attn_scalar v_head_dim", lambda config: (_head_dim(config),)),
    **_named("attention_value_scale key_multiplier attention_in_multiplier attention_out_multiplier", (1,)),
    **_named("sliding_window", _windows),
    **_named("use_sliding_window attention_chunk_size attention_window_size sliding_window_size", _NO),
    **_named("layer_types", all_layers("full_attention")),
    **_named("layers_block_type num_attention_heads_per_layer per_layer_config", ()),
    # positions
    **_named("partial_rotary_factor rotary_pct", (1,)),
    **_named("rotary_dim", lambda config: (_head_dim(config),)),
    **_named("rope_interleave alibi no_rope_layer_interval", _NO),
    **_named("no_rope_layers", all_layers(1)),
    **_named("layer_rope_theta", ()),
    **_named("position_embedding_type", ("rope",)),
    # feed-forward network
    **_named("hidden_act hidden_activation activation_function activation", _SILU),
    **_named("mlp_bias", _NO),
    **_named("mlp_multipliers", ([1, 1],)),
    **_named("swiglu_alpha swiglu_limit", ()),
    **_named("num_experts num_local_experts n_routed_experts moe_num_experts enable_moe_block", _NO),
    # residual stream, norms, logits
    **_named("embedding_multiplier residual_multiplier scale_emb embedding_scale", (1,)),
    **_named("scale_depth", lambda config: (math.sqrt(_size(config, "num_hidden_layers")),)),
    **_named("scale_embedding mup_enabled use_post_norm parallel_attn use_parallel_residual", _NO),
    **_named("hidden_size_per_layer_input hc_mult", _NO),
    **_named("logits_scaling logit_scale lm_head_multiplier", (1,)),
    **_named("dim_model_base", lambda config: (_size(config, "hidden_size"),)),
    **_named("final_logit_softcapping logits_soft_cap lm_head_bias", _NO),
    **_named("quantization_config", ()),
}

# Of families with experts besides.
OF_EXPERTS: Final[Mapping[str, Rule]] = {
    **_named("first_k_dense_replace num_dense_layers", _NO),
    **_named("mlp_only_layers", ()),
    **_named("decoder_sparse_step interleave_moe_layer_step n_group topk_group", (1,)),
    **_named("shared_expert_intermediate_size n_shared_experts num_shared_experts", _NO),
    **_named("routed_scaling_factor route_scale moe_routed_scaling_factor moe_router_logit_softcapping", (1,)),
    **_named("mlp_layer_types", all_layers("sparse")),
    **_named("scoring_func", ("softmax",)),
    **_named("topk_method", ("greedy",)),
    **_named("norm_topk_prob", (True,)),
}


def check_computation(config: Config, read: frozenset[str], own: Mapping[str, Rule], *, has_experts: bool) -> None:
    """Raise ConfigError for a key that a family does not `read` and whose value would change what is computed.

    `own`: keys of which other values than those above change nothing in this family.
    """
    for key, allowed in {**COMPUTATION, **(OF_EXPERTS if has_experts else {}), **own}.items():
        value = config.get(key)
        if key in read or value is None or value in ([], {}):
            continue
        values = allowed(config) if callable(allowed) else allowed
        if not any(_is_same(value, neutral) for neutral in values):
            supported = f"only {values[0]!r} is supported" if values else "which is not supported"
            raise ConfigError(f"config key {key} is {short(value)}, {supported}")


def left_out(config: Config, read: frozenset[str]) -> list[str]:
    """Names that nothing here knows. Raises ConfigError for one that is a misspelt key which the family reads."""
    unknown = sorted(set(config) - read - INERT - set(COMPUTATION) - set(OF_EXPERTS))
    for name in unknown:
        for key in read - set(config):
            if differs_by_one(name, key):
                raise ConfigError(f"unknown config key {short(name)}; is it {key}, which is missing?")
    return unknown


def _is_same(value: object, neutral: object) -> bool:
    """Whether they are equal, to the precision of a published number."""
    if isinstance(value, float) and isinstance(neutral, float):
        return math.isclose(value, neutral, rel_tol=1e-6)
    return value == neutral


def differs_by_one(name: str, key: str) -> bool:
    """Whether one character is another, too many or missing."""
    if abs(len(name) - len(key)) > 1:
        return False
    start = next((i for i, (one, other) in enumerate(zip(name, key, strict=False)) if one != other), min(len(name), len(key)))
    return any(name[start + skip :] == key[start + missing :] for skip, missing in ((1, 1), (1, 0), (0, 1)))
