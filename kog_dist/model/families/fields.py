"""Fields of a `config.json` that several families have, read strictly: kinds of values, contradictions, rotary scaling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.model.rope_scaling import SCALINGS, RopeScaling, YarnScaling
from kog_dist.quoting import short

# Keys that transformers writes into every config.json and that change nothing here.
IGNORED_KEYS = frozenset(
    """_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype transformers_version
    use_cache initializer_range attention_dropout hidden_dropout return_dict output_attentions output_hidden_states
    output_router_logits is_encoder_decoder pad_head_dim_to_multiple_of""".split()
)
_LARGEST_NUMBER = 2**53
_ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the second is the name in transformers 5


def number(config: Mapping[str, Any], key: str, default: Any, kind: type) -> Any:
    """The value of a key as `kind` (int, float or bool), null as missing. Raises ConfigError, also if it has no default."""
    value: Any = default if config.get(key) is None else config[key]  # published files write null for "as by default"
    accepted = (int, float) if kind is float else (kind,)
    if value is None:
        raise ConfigError(f"config key {key} is missing; fetch config.json again from where the model was published")
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise ConfigError(f"config key {key} must be {kind.__name__}, got {short(value)}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ConfigError(f"config key {key} must be a finite number of ordinary size, got {short(value)}")
    return kind(value)


def check_keys(config: Mapping[str, Any], known: frozenset[str], fixed: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError for keys that are not `known`, and for values of `fixed` ones that are not those listed."""
    unknown = sorted(set(config) - known - IGNORED_KEYS - set(fixed))
    if unknown:
        raise ConfigError(f"unknown config keys: {', '.join(map(short, unknown[:8]))}")
    for key, allowed in fixed.items():
        if key in config and config[key] not in allowed:
            raise ConfigError(f"config key {key} is {short(config[key])}, only {allowed[0]!r} is supported")


def read_rope(config: Mapping[str, Any], max_context: int) -> tuple[float, RopeScaling | None]:
    """Base of the rotary frequencies and their scaling, from either of its keys. Raises ConfigError."""
    theta = float(number(config, "rope_theta", 1e4, float))
    given = {key: dict(config[key]) for key in _ROPE_KEYS if _is_object(config, key)}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        both = " contradicts ".join(f"{key} {short(value)}" for key, value in given.items())
        raise ConfigError(both)
    for key, raw in given.items():
        nested = float(number(raw, "rope_theta", theta, float))
        if config.get("rope_theta") is not None and nested != theta:
            raise ConfigError(f"{key}.rope_theta {nested} contradicts rope_theta {theta}")
        raw.pop("rope_theta", None)
        return nested, _rope_scaling(key, raw, max_context)
    return theta, None


def _is_object(config: Mapping[str, Any], key: str) -> bool:
    if config.get(key) is not None and not isinstance(config[key], Mapping):
        raise ConfigError(f"config key {key} must be an object, got {short(config[key])}")
    return config.get(key) is not None


def _rope_scaling(key: str, raw: dict[str, Any], max_context: int) -> RopeScaling | None:
    old_name = raw.pop("type", None)
    kind = raw.pop("rope_type", old_name)
    if old_name not in (None, kind):
        raise ConfigError(f"{key}.type {short(old_name)} contradicts {key}.rope_type {short(kind)}")
    if kind in (None, "default"):
        _check_scaling_keys(key, kind, raw, (), ())
        return None
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise ConfigError(f"{key} type {short(kind)} is not supported; supported: default, {', '.join(sorted(SCALINGS))}")
    if kind == "yarn":
        return _yarn(key, raw, max_context)
    names = [field.name for field in fields(SCALINGS[kind])]
    _check_scaling_keys(key, kind, raw, names, ())
    kinds = {name: int if name == "original_max_position_embeddings" else float for name in names}
    return SCALINGS[kind](**{name: number(raw, name, None, kinds[name]) for name in names})


def _check_scaling_keys(key: str, kind: str | None, raw: Mapping[str, Any], needed: Iterable[str], other: Iterable[str]) -> None:
    if not set(needed) <= set(raw) <= {*needed, *other}:
        wanted = ", ".join(["rope_type", *sorted(needed)])
        raise ConfigError(f"{key} of type {kind} must have exactly the keys {wanted}; got also or only {short(sorted(raw), 200)}")


def _yarn(key: str, raw: Mapping[str, Any], max_context: int) -> YarnScaling:
    optional = ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
                "truncate")  # fmt: skip
    _check_scaling_keys(key, "yarn", raw, ("factor",), optional)
    factor, mscale, of_all = (
        number(raw, name, 0.0 if name != "factor" else None, float) for name in ("factor", "mscale", "mscale_all_dim")
    )
    if not factor >= 1:
        raise ConfigError(f"{key}.factor must be at least 1, got {factor}")
    usual = YarnScaling.usual_attention_factor(factor, mscale, of_all)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=number(raw, "original_max_position_embeddings", max_context, int),
        attention_factor=number(raw, "attention_factor", usual, float),
        beta_fast=number(raw, "beta_fast", 32.0, float),
        beta_slow=number(raw, "beta_slow", 1.0, float),
        truncate=number(raw, "truncate", True, bool),
    )
