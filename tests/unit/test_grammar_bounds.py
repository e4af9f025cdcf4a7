"""What is refused by looking at it, and that nothing else is: schemas and regular expressions that people use pass."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kog_dist.workers.grammar.bounds import MAX_LEAST, MAX_OPENINGS, Beyond, check_regex, check_schema


def optional(count: int, first: int = 0) -> dict[str, Any]:
    return {"type": "object", "properties": {f"k{index}": {"type": "string"} for index in range(first, first + count)}}


def chain(count: int) -> dict[str, Any]:
    """Definitions that lead to each other, twice each: 2**count ways, and two objects."""
    links = {f"d{index}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{index + 1}"}]} for index in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": optional(400)}}


@pytest.mark.parametrize(
    "schema",
    [
        {}, optional(400), optional(4000) | {"required": [f"k{index}" for index in range(0, 4000, 2)]},
        {"anyOf": [optional(200), optional(200, 200)]}, {"properties": {"a": optional(400), "b": optional(400)}},
        {"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}, {"$ref": "#"}, chain(60),
        {"type": "string", "maxLength": 2**31 - 1}, {"type": "array", "maxItems": 2**31 - 1, "minItems": MAX_LEAST},
        {"enum": list(range(5000))}, {"enum": [{"a": index} for index in range(1900)]}, {"const": {"minItems": "x"}},
        {"multipleOf": 86400}, {"multipleOf": 0.01}, {"multipleOf": 1_000_000}, {"multipleOf": 3}, {"multipleOf": 0.33333},
        {"allOf": [{"multipleOf": 100}, {"multipleOf": 60}]}, {"anyOf": [{"multipleOf": p} for p in (97, 89, 83, 79)]},
        {"multipleOf": 0}, {"multipleOf": -1}, {"multipleOf": True}, {"multipleOf": "x"}, {"multipleOf": None},
        {"multipleOf": 1e400},
        {"required": 5}, {"properties": []}, {"required": [[]], "properties": {"a": 1}}, {"$ref": "#/a/b"}, {"$ref": 5},
        {"pattern": 5}, {"anyOf": 5}, {"$ref": "https://example.com/a"}, {"pattern": "^(\\w{1,50} ){1,50}$"}, {"enum": None},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)  # fmt: skip
def test_what_passes(schema: dict[str, Any]) -> None:
    check_schema(schema)


@pytest.mark.parametrize(
    ("schema", "finding"),
    [
        (optional(1500), "6001 things may come next"), (optional(500), "at most 1960 may .an optional property counts for 4"),
        (optional(1200) | {"required": ["k0", "k1199"]}, "things may come next"),
        (optional(600) | {"required": ["k0", "k599"]}, "about 2393 things may come next"),
        ({"properties": {"a": {"items": optional(1500)}}}, "things may come next"),
        ({"anyOf": [optional(300), optional(300, 300)]}, "things may come next"),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"oneOf": [optional(300), {"$ref": "#/$defs/c"}]}, "c": optional(250)}},
         "things"),
        ({"enum": [{"a": index} for index in range(MAX_OPENINGS + 1)]}, "things may come next"),
        ({"multipleOf": 99_999_989}, "remainders by 99999989"),
        ({"items": {"multipleOf": 99_999_989.0}}, "remainders by 99999989"),
        ({"multipleOf": 999_983}, "remainders by 999983; at most 1000000, and of integers 50000"),
        ({"multipleOf": 1e9}, "remainders"),
        ({"multipleOf": 0.123456789}, "remainders"), ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "by 99400891"),
        ({"multipleOf": 9973, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 9967}}}, "by 99400891"),
        ({"minItems": 1_000_000}, "minItems is 1000000; at most 100000"), ({"minLength": 2**31}, "minLength is"),
        ({"not": {"minProperties": 1e9}}, "minProperties is"),
        ({"pattern": "(a{1,1000}){1,1000}"}, "repeats a piece 1000000 times"),
        ({"patternProperties": {"a{9999999}": {}}}, "repeats a piece"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_what_is_refused(schema: dict[str, Any], finding: str) -> None:
    with pytest.raises(Beyond, match=finding):
        check_schema(schema)


@pytest.mark.parametrize(
    "regex",
    [
        "", "a{150000}", "(\\w{1,50} ){1,50}", "((\\w{1,50} ){1,50}\\n){1,50}", "\\{1000000}", "[{1000000}]", "[]{1000000}]",
        "[^]{1000000}]", "[\\]{1000000}]", "(a|b{300}){5}", "a{300}b{400}c{400}", "a{300}*b{400}", "(", ")))", "a{", "a{x}",
        "{5}", "(a{1000})(b{1000})", "(a{300}|(b{300})){300}",
    ],
)  # fmt: skip
def test_regular_expressions_that_pass(regex: str) -> None:
    check_regex(regex)


@pytest.mark.parametrize(
    "regex",
    [
        "a{1000000}", "a{2147483647}", "(a{1,1000}){1,1000}", "((a{1000}){1000})", "(?:x{800}y*){800}", "(a{1000}b)*{1000}",
        "a{150001,}", "a{0,150001}", "[a-z]{1000000}", "\\w{1000000}", "((a{100}){100}){100}", "a{1000}{1000}",
        "x(a(b{900})c){900}",
    ],
)  # fmt: skip
def test_regular_expressions_that_are_refused(regex: str) -> None:
    with pytest.raises(Beyond, match="repeats a piece"):
        check_regex(regex)
