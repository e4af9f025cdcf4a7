"""Changes to all schemas that a JSON schema consists of: where it holds others, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

VALUES: Final = frozenset({"const", "enum", "default", "examples", "example"})  # keywords that hold values
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # and schemas by name


def rewritten(schema: Any, change: Callable[[dict[str, object]], dict[str, object]]) -> object:
    """The schema with `change` made to it and to each one that it holds, to inner ones first. What is given stays as it is."""
    if isinstance(schema, list):
        return [rewritten(item, change) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return change({key: _member(key, value, change) for key, value in schema.items()})


def _member(key: str, value: object, change: Callable[[dict[str, object]], dict[str, object]]) -> object:
    if key in VALUES:
        return value
    if key in NAMED and isinstance(value, Mapping):
        return {name: rewritten(inner, change) for name, inner in value.items()}
    return rewritten(value, change)
