"""Which objects of a tool's parameters have no other properties than those that are listed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kog_dist.gateway.openai.closed_schemas import closed
from kog_dist.json_schema import rewritten

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}}}


def shut(schema: dict[str, Any]) -> dict[str, Any]:
    return schema | {"additionalProperties": False}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lists its properties": (A, shut(A)),
    "lists none": ({"type": "object", "properties": {}}, shut({"type": "object", "properties": {}})),
    "without type": ({"properties": {"a": {}}}, shut({"properties": {"a": {}}})),
    "has no list": ({"type": "object"}, {"type": "object"}),
    "says true": (A | {"additionalProperties": True}, A | {"additionalProperties": True}),
    "says a schema": (A | {"additionalProperties": A}, A | {"additionalProperties": shut(A)}),
    "has patterns, too": (A | {"patternProperties": {"^x": A}}, shut(A | {"patternProperties": {"^x": shut(A)}})),
    "nested": ({"properties": {"x": {"items": A}}}, shut({"properties": {"x": {"items": shut(A)}}})),
    "tuples": ({"properties": {"x": {"prefixItems": [A, B]}}}, shut({"properties": {"x": {"prefixItems": [shut(A), shut(B)]}}})),
    "in $defs": (
        {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": A}},
        shut({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": shut(A)}}),
    ),
    "alternatives": ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [shut(A), {"type": "null"}]}),
    "one of two": ({"oneOf": [A, B]}, {"oneOf": [shut(A), shut(B)]}),
    "alternatives by reference": (
        {"anyOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {"anyOf": [{"$ref": "#/$defs/A"}, shut(B)], "$defs": {"A": shut(A)}},
    ),
    "all of one, as pydantic writes it": (
        {"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "description": "d"}}, "$defs": {"A": A}},
        shut({"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "description": "d"}}, "$defs": {"A": shut(A)}}),
    ),
    "all of two": ({"allOf": [A, B]}, {"allOf": [A, B]}),
    "all of two by reference": (
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
    ),
    "inside of all of two": ({"allOf": [{"properties": {"x": A}}, B]}, {"allOf": [{"properties": {"x": shut(A)}}, B]}),
    "alternatives next to properties": (A | {"anyOf": [B, {}]}, A | {"anyOf": [B, {}]}),
    "a reference next to properties": (
        A | {"$ref": "#/$defs/B", "$defs": {"B": B}},
        A | {"$ref": "#/$defs/B", "$defs": {"B": B}},
    ),
    "two kinds of alternatives": ({"anyOf": [A], "oneOf": [B]}, {"anyOf": [A], "oneOf": [B]}),
    "conditions": (A | {"if": A, "then": B}, A | {"if": A, "then": B}),
    "what must not hold": ({"properties": {"x": {"not": A}}}, shut({"properties": {"x": {"not": A}}})),
    "values": (
        {"properties": {"x": {"const": A, "default": A, "enum": [A]}}},
        shut({"properties": {"x": {"const": A, "default": A, "enum": [A]}}}),
    ),
    "names that are keywords": (
        {"properties": {"properties": A, "enum": A, "$ref": {"type": "string"}}},
        shut({"properties": {"properties": shut(A), "enum": shut(A), "$ref": {"type": "string"}}}),
    ),
    "a name with a slash": (
        {"allOf": [{"$ref": "#/$defs/a~1b"}, B], "$defs": {"a/b": A}},
        {"allOf": [{"$ref": "#/$defs/a~1b"}, B], "$defs": {"a/b": A}},
    ),
    "to itself": (
        {"properties": {"next": {"$ref": "#"}}},
        shut({"properties": {"next": {"$ref": "#"}}}),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_object_has_the_properties_that_are_listed(name: str) -> None:
    given, wanted = CASES[name]
    before = copy.deepcopy(given)
    assert closed(given) == wanted
    assert given == before
    assert closed(wanted) == wanted


def test_each_schema_is_rewritten_once_and_nothing_else() -> None:
    seen: list[Any] = []

    def change(schema: dict[str, Any]) -> dict[str, Any]:
        seen.append(schema.get("title"))
        return schema

    schema = {
        "title": 1, "const": {"title": 0}, "properties": {"title": {"title": 2}, "enum": {"title": 3, "enum": [{"title": 0}]}},
        "items": [{"title": 4}, True], "anyOf": [{"title": 5}], "required": ["title"],
    }  # fmt: skip
    assert rewritten(schema, change) == schema
    assert sorted(seen) == [1, 2, 3, 4, 5]
