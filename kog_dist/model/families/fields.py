"""Fields of a `config.json` that several families have, read strictly: kinds of values, contradictions, rotary scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias, TypeVar

from kog_dist.errors import ConfigError
from kog_dist.model.rope_scaling import SCALINGS, RopeScaling, YarnScaling
from kog_dist.quoting import short

Config: TypeAlias = Mapping[str, object]  # as it was published: whoever reads a value checks it
Number = TypeVar("Number", bound=float)  # int, float or bool
_LARGEST_NUMBER = 2**53
_ROPE_KEYS = ("rope_scaling", "rope_parameters")  # the second is the name in transformers 5


def number(config: Config, key: str, default: Number | None, kind: type[Number]) -> Number:
    """The value of a key as `kind` (int, float or bool), null as missing. Raises ConfigError, also if it has no default."""
    value: object = default if config.get(key) is None else config[key]  # published files write null for "as by default"
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    accepted: tuple[type[float], ...] = (int, float) if kind is float else (kind,)
    if value is None:
        raise ConfigError(f"config key {key} is missing; fetch config.json again from where the model was published")
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, accepted):
        raise ConfigError(f"config key {key} must be {kind.__name__}, got {short(value)}")
    if isinstance(value, int | float) and not abs(value) <= _LARGEST_NUMBER:
        raise ConfigError(f"config key {key} must be a finite number of ordinary size, got {short(value)}")
    return kind(value)


def read_rope(config: Config, max_context: int) -> tuple[float, RopeScaling | None]:
    """Base of the rotary frequencies and their scaling, from either of its keys. Raises ConfigError."""
    found = [(key, dict(raw)) for key in _ROPE_KEYS if (raw := _object(config, key)) is not None]
    given = {"rope_theta": config.get("rope_theta")} | {f"{key}.rope_theta": raw.pop("rope_theta", None) for key, raw in found}
    bases: dict[str, float] = {name: number(given, name, None, float) for name, value in given.items() if value is not None}
    if len(set(bases.values())) > 1:
        raise ConfigError(" contradicts ".join(f"{name} {value}" for name, value in bases.items()))
    scalings = [(f"{key} {short(raw)}", read_scaling(key, raw, config, max_context)) for key, raw in found]
    if any(scaling != scalings[0][1] for _, scaling in scalings):
        raise ConfigError(" contradicts ".join(shown for shown, _ in scalings))
    return next(iter(bases.values()), 1e4), scalings[0][1] if scalings else None


def _object(config: Config, key: str) -> Config | None:
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"config key {key} must be an object, got {short(value)}")
    return value


# Of a scaling: keys that change what is computed, with the value of each that does not. A type that reads none of them, and
# gets another value, is refused: whoever wrote it wanted something else than the type says.
_NEUTRAL: Mapping[str, float | None] = {
    "factor": 1.0, "attention_factor": 1.0, "attn_factor": 1.0, "extrapolation_factor": 1.0, "partial_rotary_factor": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "alpha": 1.0, "short_factor": None, "long_factor": None, "short_mscale": None,
    "long_mscale": None,
}  # fmt: skip
_PLAIN = ("default", "dynamic")  # the second stretches positions beyond max_position_embeddings alone, which nobody is given
_ORIGINAL = "original_max_position_embeddings"
_MORE_OF_YARN = frozenset(("attn_factor", "mscale", "mscale_all_dim"))


def read_scaling(key: str, raw: Config, config: Config, max_context: int) -> RopeScaling | None:
    """What `rope_scaling` or `rope_parameters` (`key`) says. Raises ConfigError."""
    kind = _kind(raw)
    if raw.get("type") not in (None, kind):
        raise ConfigError(f"{key}.type {short(raw['type'])} contradicts {key}.rope_type {short(kind)}")
    if not isinstance(kind, str) or kind not in (*_PLAIN, *SCALINGS):
        raise ConfigError(f"{key} type {short(kind)} is not supported; supported: {', '.join((*_PLAIN, *sorted(SCALINGS)))}")
    read = _names_read(kind)
    for name, value in raw.items():
        if isinstance(value, Mapping):
            raise ConfigError(f"{key} has a scaling of its own for {short(name)}, which is not supported; supported: one for all")
        if name in _NEUTRAL and name not in read and value not in (None, [], _NEUTRAL[name]):
            raise ConfigError(f"{key}.{name} is {short(value)}, which type {kind} does not have; give the type that it is for")
    if kind in _PLAIN:
        return None
    original = _original_context(key, raw, config)
    if kind == "yarn":
        return _yarn(key, raw, original, max_context)
    given = {**raw, _ORIGINAL: max_context if original is None else original}
    values: dict[str, Any] = {name: _of(key, given, name, None, int if name == _ORIGINAL else float) for name in read}
    return SCALINGS[kind](**values)


def unread_of_rope(config: Config) -> list[str]:
    """Names in `rope_scaling` and `rope_parameters` that their type does not have."""
    found = {key: raw for key in _ROPE_KEYS if (raw := _object(config, key)) is not None}
    always = {"rope_type", "type", "rope_theta"}
    return [f"{key}.{name}" for key, raw in found.items() for name in sorted(set(raw) - _names_read(_kind(raw)) - always)]


def _kind(raw: Config) -> object:
    return raw.get("rope_type") or raw.get("type") or "default"


def _names_read(kind: object) -> frozenset[str]:
    """The keys of a type of scaling."""
    known = SCALINGS.get(kind) if isinstance(kind, str) else None
    names = () if known is None else (field.name for field in fields(known))
    return frozenset(names) | {"yarn": _MORE_OF_YARN, "dynamic": frozenset(("factor",))}.get(str(kind), frozenset())


def _of(key: str, raw: Config, name: str, default: Number | None, kind: type[Number]) -> Number:
    """`number` of one of a scaling's keys."""
    return number({f"{key}.{name}": raw.get(name)}, f"{key}.{name}", default, kind)


def _original_context(key: str, raw: Config, config: Config) -> int | None:
    """The context that a model was first trained for: of the scaling, or beside it, as some families have it."""
    found = [_of(key, raw, _ORIGINAL, 0, int), number(config, _ORIGINAL, 0, int)]
    given = [value for value in found if value]
    if len(set(given)) > 1:
        raise ConfigError(f"{key}.{_ORIGINAL} {found[0]} contradicts {_ORIGINAL} {found[1]}")
    return given[0] if given else None


def _yarn(key: str, raw: Config, original: int | None, max_context: int) -> YarnScaling:
    """Without a factor it is how much longer the context is than the original one, as transformers has it."""
    implied = None if original is None else max_context / original
    factor = _of(key, raw, "factor", implied, float)
    mscale, of_all = (_of(key, raw, name, 0.0, float) for name in ("mscale", "mscale_all_dim"))
    if not factor >= 1:
        raise ConfigError(f"{key}.factor must be at least 1, got {factor}")
    times = _of(key, raw, "attn_factor", 1.0, float)
    if times != 1 and raw.get("attention_factor") is not None:
        raise ConfigError(f"{key}.attn_factor {times} contradicts {key}.attention_factor {short(raw['attention_factor'])}")
    usual = YarnScaling.usual_attention_factor(factor, mscale, of_all)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=max_context if original is None else original,
        attention_factor=times * _of(key, raw, "attention_factor", usual, float),
        beta_fast=_of(key, raw, "beta_fast", 0.0, float) or 32.0,
        beta_slow=_of(key, raw, "beta_slow", 0.0, float) or 1.0,
        truncate=_of(key, raw, "truncate", True, bool),
    )
