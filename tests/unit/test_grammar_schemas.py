"""What of JSON schemas stops nothing, and what is said of what cannot be enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kog_dist.workers.grammar.compiler import Constraint, ConstraintError, ConstraintKind
from kog_dist.workers.grammar.schemas import FORMATS, without_unknown_formats
from tests.unit.test_grammar_compiler import compiler, tokenizer

UNKNOWN = ("uri-reference", "password", "regex", "json-pointer", "byte", "int32", "idn-email", "made up", "")
OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_formats_stop_nothing(name: str) -> None:
    text = {"type": ["string", "null"], "format": name, "maxLength": 3}
    wanted = {"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}}
    assert json.loads(without_unknown_formats(json.dumps({"properties": {"a": text}}))) == wanted
    compiler().compile(schema({"anyOf": [{"items": text}, {"$ref": "#/$defs/x"}], "$defs": {"x": text}}))


def test_what_is_no_format_stays() -> None:
    kept = {"properties": {"format": {"const": {"format": "password"}}}, "enum": [{"format": "password"}], "x": "format"}
    assert json.loads(without_unknown_formats(json.dumps(kept))) == kept
    with pytest.raises(ConstraintError, match="format"):
        compiler().compile(schema({"type": "string", "format": 5}))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_known_formats_are_enforced(name: str) -> None:
    matcher = compiler().compile(schema({"type": "string", "format": name}))
    ids = tokenizer().encode('"§"', add_special_tokens=False)
    is_taken = True
    for token_id in ids:
        is_taken = is_taken and bool(int(matcher.mask()[token_id // 32]) >> token_id % 32 & 1)
        if is_taken:
            matcher.accept(token_id)
    assert not is_taken, "no format has this sign"


def test_a_one_of_that_cannot_be_enforced_says_what_to_do() -> None:
    other = OPEN | {"properties": {"b": {"type": "string"}}, "required": ["b"]}
    with pytest.raises(ConstraintError, match="use anyOf, or set additionalProperties to false") as caught:
        compiler().compile(schema({"oneOf": [OPEN, other]}))
    assert "coerce" not in str(caught.value)
    closed = [{**one, "additionalProperties": False} for one in (OPEN, other)]
    compiler().compile(schema({"oneOf": closed}))
    compiler().compile(schema({"anyOf": [OPEN, other]}))
