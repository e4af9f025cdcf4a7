"""Schemas of tools as their authors mean them: an object has the properties that are listed, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kog_dist.json_schema import NAMED, VALUES

_ALTERNATIVES: Final = ("allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")  # of the same value
_SAID_OTHERWISE: Final = ("additionalProperties", "unevaluatedProperties")
_NOT_CLOSED: Final = VALUES | {"not", "if"}  # closing what must not hold would open the whole


def closed(schema: Mapping[str, Any]) -> dict[str, object]:
    """The schema with `additionalProperties` false in each object, nested and in $defs, that lists properties and does not say.

    Left open is one that has no `properties`, and one whose properties are listed in several places: with allOf, or with
    alternatives or a reference next to `properties`.
    """
    shared = set(_shared_references(schema, alone=True))
    found: dict[str, Any] = _closed(schema, "#", shared, alone=True)
    return found


def _closed(schema: Any, place: str, shared: set[str], *, alone: bool) -> Any:
    if isinstance(schema, list):
        return [_closed(item, f"{place}/{idx}", shared, alone=alone) for idx, item in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    alone = alone and place not in shared
    found = {}
    for key, value in schema.items():
        inner = _is_alone(schema, alone) if key in _ALTERNATIVES else True
        at = f"{place}/{_escaped(key)}"
        if key in _NOT_CLOSED:
            found[key] = value
        elif key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _closed(item, f"{at}/{_escaped(name)}", shared, alone=inner) for name, item in value.items()}
        else:
            found[key] = _closed(value, at, shared, alone=inner)
    says = any(key in schema for key in (*_SAID_OTHERWISE, *_ALTERNATIVES))
    if alone and not says and isinstance(schema.get("properties"), Mapping):
        found["additionalProperties"] = False
    return found


def _shared_references(schema: Any, *, alone: bool) -> Iterator[str]:
    """Places of schemas that describe a part of a value, next to others that describe it."""
    if isinstance(schema, list):
        for item in schema:
            yield from _shared_references(item, alone=alone)
    if not isinstance(schema, Mapping):
        return
    inner = _is_alone(schema, alone)
    if not inner and isinstance(schema.get("$ref"), str):
        yield schema["$ref"]
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            for item in value.values():
                yield from _shared_references(item, alone=inner if key in _ALTERNATIVES else True)
        elif key not in _NOT_CLOSED:
            yield from _shared_references(value, alone=inner if key in _ALTERNATIVES else True)


def _is_alone(schema: Mapping[str, Any], alone: bool) -> bool:
    """Whether one of the alternatives in this schema lists all properties of its value."""
    kinds = [key for key in _ALTERNATIVES if key in schema]
    parts = schema.get("allOf")
    return alone and "properties" not in schema and len(kinds) <= 1 and not (isinstance(parts, list) and len(parts) > 1)


def _escaped(key: str) -> str:
    """A name as a step of a reference has it."""
    return key.replace("~", "~0").replace("/", "~1")
