"""Laneformers: `config.json` in both field revisions. Their files hold tensors as the engine names them."""

from __future__ import annotations

from kog_dist.errors import ConfigError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.families.fields import Config, number, read_rope
from kog_dist.model.families.stored import Family, same_names
from kog_dist.model.spec import MODEL_TYPES, HeadType, ModelSpec
from kog_dist.model_limits import MAX_LAYERS
from kog_dist.quoting import short

_KEYS = frozenset(
    """model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling rope_parameters norm_eps
    rms_norm_eps num_lanes broadcast_delay use_comm use_attention_comm use_mlp_comm use_early_comm lm_head_type
    pre_norm_lane_agg replicated_rmsn_scale tie_word_embeddings sliding_window sliding_window_n_layers
    unclamped_layers swa_layers head_dim qkv_bias out_bias qk_norm attention_sinks experts""".split()
)


def read_config(config: Config) -> ModelSpec:
    """The spec in a parsed `config.json`. Raises ConfigError naming the key that is unknown, missing or contradictory."""
    num_heads = number(config, "num_attention_heads", None, int)
    num_layers = min(number(config, "num_hidden_layers", None, int), MAX_LAYERS + 1)  # ModelSpec refuses the excess
    attention_comm, mlp_comm = _comm(config)
    sliding_window, window_layers = _windows(config, num_layers)
    theta, scaling = read_rope(config, number(config, "max_position_embeddings", None, int))
    return ModelSpec(
        hidden_size=number(config, "hidden_size", None, int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=number(config, "num_key_value_heads", num_heads, int),
        intermediate_size=number(config, "intermediate_size", None, int),
        vocab_size=number(config, "vocab_size", None, int),
        max_context=number(config, "max_position_embeddings", None, int),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_norm_eps(config),
        num_lanes=number(config, "num_lanes", 1, int),
        delay=number(config, "broadcast_delay", 1, int),
        attention_comm=attention_comm,
        mlp_comm=mlp_comm,
        early_comm=number(config, "use_early_comm", True, bool),
        head_type=_head_type(config),
        pre_norm_lane_agg=number(config, "pre_norm_lane_agg", False, bool),
        shared_norm_scale=number(config, "replicated_rmsn_scale", True, bool),
        tied_embeddings=number(config, "tie_word_embeddings", False, bool),
        sliding_window=sliding_window,
        window_layers=window_layers,
        own_head_dim=number(config, "head_dim", 0, int) or None,
        qkv_bias=number(config, "qkv_bias", False, bool),
        out_bias=number(config, "out_bias", False, bool),
        qk_norm=number(config, "qk_norm", False, bool),
        attention_sinks=number(config, "attention_sinks", False, bool),
        experts=ExpertsSpec.from_config(config.get("experts")),
    )


def _head_type(config: Config) -> HeadType:
    try:
        return HeadType(config.get("lm_head_type", "replicate"))
    except ValueError:
        names = ", ".join(kind.value for kind in HeadType)
        raise ConfigError(f"lm_head_type {short(config['lm_head_type'])} is not supported; supported: {names}") from None


def _norm_eps(config: Config) -> float:
    if "norm_eps" in config and "rms_norm_eps" in config and config["norm_eps"] != config["rms_norm_eps"]:
        raise ConfigError(f"norm_eps {short(config['norm_eps'])} contradicts rms_norm_eps {short(config['rms_norm_eps'])}")
    key = "rms_norm_eps" if "rms_norm_eps" in config else "norm_eps"
    return float(number(config, key, 1e-5, float))


def _comm(config: Config) -> tuple[bool, bool]:
    both = number(config, "use_comm", True, bool)
    flags = []
    for key in ("use_attention_comm", "use_mlp_comm"):
        flag = number(config, key, both, bool)
        if "use_comm" in config and flag != both:
            raise ConfigError(f"{key} {flag} contradicts use_comm {both}")
        flags.append(flag)
    return flags[0], flags[1]


def _layer_list(config: Config, key: str, num_layers: int) -> tuple[int, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ConfigError(f"config key {key} must be a list of layer numbers, got {short(value)}")
    for layer in value:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"config key {key} names layer {layer}; the model has {num_layers} layers")
    return tuple(sorted(set(value)))


def _windows(config: Config, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = None if config.get("sliding_window") is None else int(number(config, "sliding_window", None, int))
    first = int(number(config, "sliding_window_n_layers", 0, int))
    if abs(first) > max(num_layers, 0):
        raise ConfigError(f"sliding_window_n_layers {first} exceeds the {num_layers} layers of the model")
    unclamped = set(_layer_list(config, "unclamped_layers", num_layers))
    counted = range(first) if first >= 0 else range(num_layers + first, num_layers)
    from_count = tuple(i for i in counted if i not in unclamped)
    listed = _layer_list(config, "swa_layers", num_layers)
    if config.get("swa_layers") is not None and "sliding_window_n_layers" in config and listed != from_count:
        raise ConfigError(f"swa_layers {short(listed)} contradicts sliding_window_n_layers {first}: {short(from_count)}")
    if unclamped & set(listed):
        raise ConfigError(f"layers {short(sorted(unclamped & set(listed)))} stand in both swa_layers and unclamped_layers")
    return window, listed or from_count


FAMILY = Family(MODEL_TYPES, read_config, same_names, keys=_KEYS)
