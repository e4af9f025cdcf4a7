"""What a process is told on its command line: a frozen dataclass as one JSON object, checked field by field."""

from __future__ import annotations

import json
import types
from dataclasses import asdict, fields, is_dataclass
from typing import Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from kog_dist.errors import ConfigError
from kog_dist.strict_json import object_without_duplicates


class JsonArguments:
    """Base of a frozen dataclass. Fields: bool, int, float, str, None, tuples of one type, `dict[str, Any]`, dataclasses."""

    __slots__ = ()
    reader: ClassVar[str]  # the process whose arguments these are, for messages

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises ConfigError naming what is missing, unknown or of another type."""
        try:
            values: Any = json.loads(text, object_pairs_hook=object_without_duplicates)
        except ValueError as error:
            raise ConfigError(f"the {cls.reader}'s argument is not JSON: {error}") from None
        made: Self = record_of(cls, values, f"the {cls.reader}'s argument")
        return made


def record_of(cls: type[Any], values: Any, where: str) -> Any:
    """A dataclass from what JSON said, checked field by field. Raises ConfigError, a sentence about `where`."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where} must be an object, got {type(values).__name__}")
    known, hints = [field.name for field in fields(cls)], get_type_hints(cls)
    if unknown := values.keys() - set(known):
        raise ConfigError(f"{where} has unknown fields: {', '.join(sorted(unknown))}; it takes {', '.join(known)}")
    made = {name: _value(hints[name], value, f"{where} {name}") for name, value in values.items()}
    if missing := [name for name in known if name not in values]:  # `to_json` writes those with a default, too
        raise ConfigError(f"{where} has missing fields: {', '.join(missing)}")
    return cls(**made)


def _value(kind: Any, value: object, where: str) -> object:
    """The value as the type says it; numbers and texts are never converted, but a float may be written without a point."""
    origin, inner = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return record_of(kind, value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = (one for one in inner if one is not type(None))
        return _value(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if type(value) is (origin or kind) or (kind is float and type(value) is int):
        return value
    raise ConfigError(f"{where} must be {_name(kind)}, got {value!r}")


def _name(kind: Any) -> str:
    return "a list" if get_origin(kind) is tuple else "an object" if get_origin(kind) is dict else str(kind.__name__)
