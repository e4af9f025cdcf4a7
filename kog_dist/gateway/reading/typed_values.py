"""What a value that was written without quotes is, by the schema of its parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

_MAX_REFERENCES: Final = 16
_ALL: Final = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_WORDS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}


def types_of(schema: Any, root: object) -> frozenset[str]:
    """The JSON types that a schema allows; all where it does not say. `root`: what its references begin at."""
    return _types(schema, root, _MAX_REFERENCES)


def _types(schema: Any, root: object, num_left: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or num_left == 0:
        return _ALL
    found = _ALL
    named = schema.get("type")
    if isinstance(named, str | list):
        found &= frozenset([named] if isinstance(named, str) else [name for name in named if isinstance(name, str)])
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else None
    if values is not None:
        found &= frozenset(map(_type_of, values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found &= frozenset().union(*(_types(branch, root, num_left - 1) for branch in schema[key]))
    for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        found &= _types(branch, root, num_left - 1)
    if isinstance(schema.get("$ref"), str):
        found &= _types(_referred(schema["$ref"], root), root, num_left - 1)
    if "number" in found:
        found |= {"integer"}
    return found or _ALL


def _referred(reference: str, root: object) -> object:
    """The schema that a local reference names."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in filter(None, reference[1:].split("/")):
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):  # also infinity, of digits that are too large
        return "integer" if value.is_integer() else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a value: of one of these types if it can be read so, else a string. `types` has more than `string` in it."""
    bare = text.strip()
    word = _WORDS.get(bare.lower())
    if word is not None and _fits(json.loads(word), types):
        return word
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, str) or not _fits(value, types):  # quotes are part of a string that was written with them
        return json.dumps(text, ensure_ascii=False)
    return bare


def _fits(value: object, types: frozenset[str]) -> bool:
    return _type_of(value) in types


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
