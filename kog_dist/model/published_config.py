"""Reading a published `config.json`: field names of both revisions, defaults, and what contradicts what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.model.limits import MAX_LAYERS
from kog_dist.model.manifest import read_json
from kog_dist.model.spec import MODEL_TYPES, HeadType, ModelSpec, RopeScaling
from kog_dist.quoting import short

# Keys that transformers writes into every config.json and that change nothing here.
_IGNORED_KEYS = frozenset(
    """_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version
    use_cache initializer_range attention_dropout hidden_dropout return_dict output_attentions output_hidden_states
    output_router_logits is_encoder_decoder pad_head_dim_to_multiple_of""".split()
)
_FIXED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
}
_DTYPES = ("bfloat16", "float16", "float32")
_LARGEST_NUMBER = 2**53
_ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the second is the name in transformers 5
_SPEC_KEYS = frozenset(
    """model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    max_position_embeddings rope_theta rope_scaling rope_parameters norm_eps rms_norm_eps num_lanes broadcast_delay use_comm
    use_attention_comm use_mlp_comm use_early_comm lm_head_type pre_norm_lane_agg replicated_rmsn_scale tie_word_embeddings
    sliding_window sliding_window_n_layers unclamped_layers swa_layers head_dim""".split()
)


def spec_of_folder(folder: Path) -> ModelSpec:
    """The spec of a model folder. Raises CheckpointError if `config.json` is missing, no JSON, or not a model we run."""
    return read_config_file(folder)[0]


def read_config_file(folder: Path) -> tuple[ModelSpec, str | None]:
    """See `spec_of_folder`; also the dtype of the tensors that config.json announces, None if it does not."""
    path = folder / "config.json"
    parsed = read_json(folder, path.name, None)
    if parsed is None:
        raise CheckpointError(f"{folder} has no config.json; MODEL must be a folder with a published checkpoint")
    try:
        return read_config(parsed), _dtype(parsed)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _dtype(config: Mapping[str, Any]) -> str | None:
    given = {key: config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None}
    for key, value in given.items():
        if value not in _DTYPES:
            raise ConfigError(f"config key {key} is {short(value)}; supported: {', '.join(_DTYPES)}")
    if len(set(given.values())) > 1:
        raise ConfigError(f"dtype {given['dtype']} contradicts torch_dtype {given['torch_dtype']}")
    return next(iter(given.values()), None)


def _number(config: Mapping[str, Any], key: str, default: Any, kind: type) -> Any:
    value: Any = default if config.get(key) is None else config[key]  # published files write null for "as by default"
    accepted = (int, float) if kind is float else (kind,)
    if value is None:
        raise ConfigError(f"config key {key} is missing")
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise ConfigError(f"config key {key} must be {kind.__name__}, got {short(value)}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ConfigError(f"config key {key} must be a finite number of ordinary size, got {short(value)}")
    return kind(value)


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec in a parsed `config.json`. Raises ConfigError naming the key that is unknown, missing or contradictory."""
    if config.get("model_type") not in MODEL_TYPES:
        raise ConfigError(f"model_type {short(config.get('model_type'))} is not supported; supported: {', '.join(MODEL_TYPES)}")
    unknown = sorted(set(config) - _SPEC_KEYS - _IGNORED_KEYS - set(_FIXED_VALUES))
    if unknown:
        raise ConfigError(f"unknown config keys: {', '.join(map(short, unknown[:8]))}")
    for key, allowed in _FIXED_VALUES.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"config key {key} is {short(config[key])}, only {allowed[0]!r} is supported")
    num_heads = _number(config, "num_attention_heads", None, int)
    num_layers = min(_number(config, "num_hidden_layers", None, int), MAX_LAYERS + 1)  # ModelSpec refuses the excess
    attention_comm, mlp_comm = _comm(config)
    sliding_window, window_layers = _windows(config, num_layers)
    theta, scaling = _rope(config)
    spec = ModelSpec(
        hidden_size=_number(config, "hidden_size", None, int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_number(config, "num_key_value_heads", num_heads, int),
        intermediate_size=_number(config, "intermediate_size", None, int),
        vocab_size=_number(config, "vocab_size", None, int),
        max_context=_number(config, "max_position_embeddings", None, int),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_norm_eps(config),
        num_lanes=_number(config, "num_lanes", 1, int),
        delay=_number(config, "broadcast_delay", 1, int),
        attention_comm=attention_comm,
        mlp_comm=mlp_comm,
        early_comm=_number(config, "use_early_comm", True, bool),
        head_type=_head_type(config),
        pre_norm_lane_agg=_number(config, "pre_norm_lane_agg", False, bool),
        shared_norm_scale=_number(config, "replicated_rmsn_scale", True, bool),
        tied_embeddings=_number(config, "tie_word_embeddings", False, bool),
        sliding_window=sliding_window,
        window_layers=window_layers,
    )
    if _number(config, "head_dim", spec.head_dim, int) != spec.head_dim:
        raise ConfigError(f"head_dim {config['head_dim']} contradicts hidden_size / num_attention_heads = {spec.head_dim}")
    return spec


def _head_type(config: Mapping[str, Any]) -> HeadType:
    try:
        return HeadType(config.get("lm_head_type", "replicate"))
    except ValueError:
        names = ", ".join(kind.value for kind in HeadType)
        raise ConfigError(f"lm_head_type {short(config['lm_head_type'])} is not supported; supported: {names}") from None


def _norm_eps(config: Mapping[str, Any]) -> float:
    if "norm_eps" in config and "rms_norm_eps" in config and config["norm_eps"] != config["rms_norm_eps"]:
        raise ConfigError(f"norm_eps {short(config['norm_eps'])} contradicts rms_norm_eps {short(config['rms_norm_eps'])}")
    key = "rms_norm_eps" if "rms_norm_eps" in config else "norm_eps"
    return float(_number(config, key, 1e-5, float))


def _comm(config: Mapping[str, Any]) -> tuple[bool, bool]:
    both = _number(config, "use_comm", True, bool)
    flags = []
    for key in ("use_attention_comm", "use_mlp_comm"):
        flag = _number(config, key, both, bool)
        if "use_comm" in config and flag != both:
            raise ConfigError(f"{key} {flag} contradicts use_comm {both}")
        flags.append(flag)
    return flags[0], flags[1]


def _layer_list(config: Mapping[str, Any], key: str, num_layers: int) -> tuple[int, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise ConfigError(f"config key {key} must be a list of layer numbers, got {short(value)}")
    for layer in value:
        if not 0 <= layer < num_layers:
            raise ConfigError(f"config key {key} names layer {layer}; the model has {num_layers} layers")
    return tuple(sorted(set(value)))


def _windows(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    window = None if config.get("sliding_window") is None else int(_number(config, "sliding_window", None, int))
    first = int(_number(config, "sliding_window_n_layers", 0, int))
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


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    theta = float(_number(config, "rope_theta", 1e4, float))
    given = {key: dict(config[key]) for key in _ROPE_KEYS if _is_object(config, key)}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        both = " contradicts ".join(f"{key} {short(value)}" for key, value in given.items())
        raise ConfigError(both)
    for key, raw in given.items():
        nested = float(_number(raw, "rope_theta", theta, float))
        if config.get("rope_theta") is not None and nested != theta:
            raise ConfigError(f"{key}.rope_theta {nested} contradicts rope_theta {theta}")
        raw.pop("rope_theta", None)
        return nested, _rope_scaling(key, raw)
    return theta, None


def _is_object(config: Mapping[str, Any], key: str) -> bool:
    if config.get(key) is not None and not isinstance(config[key], Mapping):
        raise ConfigError(f"config key {key} must be an object, got {short(config[key])}")
    return config.get(key) is not None


def _rope_scaling(key: str, raw: dict[str, Any]) -> RopeScaling | None:
    old_name = raw.pop("type", None)
    kind = raw.pop("rope_type", old_name)
    if old_name not in (None, kind):
        raise ConfigError(f"{key}.type {short(old_name)} contradicts {key}.rope_type {short(kind)}")
    names = {} if kind in (None, "default") else {field.name: field for field in fields(RopeScaling)}
    if kind not in (None, "default", "llama3"):
        raise ConfigError(f"{key} type {short(kind)} is not supported; supported: default, llama3")
    if set(raw) != set(names):
        wanted = ", ".join(["rope_type", *sorted(names)])
        raise ConfigError(f"{key} of type {kind} must have exactly the keys {wanted}; got also or only {short(sorted(raw), 200)}")
    if not names:
        return None
    return RopeScaling(
        factor=_number(raw, "factor", None, float),
        low_freq_factor=_number(raw, "low_freq_factor", None, float),
        high_freq_factor=_number(raw, "high_freq_factor", None, float),
        original_max_position_embeddings=_number(raw, "original_max_position_embeddings", None, int),
    )
