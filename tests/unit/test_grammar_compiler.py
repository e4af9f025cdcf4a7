"""Grammars: whatever their masks allow satisfies them, bad ones are refused by name, and hostile ones are soon done with."""

from __future__ import annotations

import functools
import json
import re
import time
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kog_dist.model.tokenizer import Tokenizer
from kog_dist.runtime.masks import num_words
from kog_dist.workers.grammar.compiler import MAX_REASON_CHARS, Constraint, ConstraintError, ConstraintKind, GrammarCompiler

DEMO = Path(str(resources.files("kog_dist"))) / "models" / "demo"
VOCAB_SIZE = 4096 + 13  # of a model whose vocabulary is longer than its tokenizer's
EOS_ID = 0


@functools.cache
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(DEMO)
    assert found is not None
    return found


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE)


def random_answer(constraint: Constraint, seed: int, max_tokens: int = 400) -> str | None:
    """Text of tokens drawn evenly from what the masks allow, ended as soon as it may; None if it never might."""
    rng = np.random.default_rng(seed)
    matcher = compiler().compile(constraint)
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        mask = matcher.mask()
        assert mask.shape == (num_words(VOCAB_SIZE),)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert len(allowed), matcher.error
        assert allowed.max() < 4096, "an id without a text is allowed"
        if EOS_ID in allowed:
            return tokenizer().decode(token_ids)
        token_ids.append(int(rng.choice(allowed)))
        matcher.accept(token_ids[-1])
    return None


@pytest.mark.parametrize(
    "regex",
    ["[a-z]{3,8}@[a-z]{1,9}\\.(com|org)", "(yes|no|maybe)", "-?[0-9]{1,4}(\\.[0-9]{2})?", "[αβγ€]{2,5}", "\\d{4}-\\d{2}"],
)
def test_answers_match_their_regular_expression(regex: str) -> None:
    for seed in range(8):
        answer = random_answer(Constraint(ConstraintKind.REGEX, regex), seed)
        assert answer is not None
        assert re.fullmatch(regex, answer), answer


def is_person(value: Any) -> bool:
    return (
        set(value) == {"name", "age", "tags"} and isinstance(value["name"], str) and len(value["name"]) <= 12
        and type(value["age"]) is int and 0 <= value["age"] <= 150
        and len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b", "c"}
    )  # fmt: skip


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"], "additionalProperties": False,
}  # fmt: skip
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"anyOf": [{"enum": [0, 1]}, {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}]}},
}


def is_tree(value: Any) -> bool:
    return value in (0, 1) or (isinstance(value, list) and len(value) <= 2 and all(map(is_tree, value)))


@pytest.mark.parametrize(
    ("schema", "holds"),
    [
        (PERSON, is_person), (TREE, is_tree), ({"enum": ["red", 7, None]}, lambda value: value in ("red", 7, None)),
        ({"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}, lambda value: re.fullmatch("[A-Z]{2}[0-9]{3}", value)),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, lambda value: len(value) == 2),
    ],
)  # fmt: skip
def test_answers_satisfy_their_schema(schema: dict[str, Any], holds: Any) -> None:
    answers = [random_answer(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), seed) for seed in range(8)]
    whole = [answer for answer in answers if answer is not None]
    assert len(whole) >= 6
    for answer in whole:
        assert holds(json.loads(answer)), answer


@pytest.mark.parametrize(
    ("kind", "text", "finding"),
    [
        (ConstraintKind.JSON_SCHEMA, "not json", "json_schema is not JSON"),
        (ConstraintKind.JSON_SCHEMA, "[1]", "must be a JSON object"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "strin"}', "json_schema cannot be used: Invalid type: strin"),
        (ConstraintKind.JSON_SCHEMA, '{"properties": 5}', "json_schema cannot be used"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "http://example.com/x.json"}', "does not fetch resources"),
        (
            ConstraintKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 3}',
            "json_schema cannot be used: Unsatisfiable",
        ),
        (ConstraintKind.JSON_SCHEMA, '{"type": "object", "unevaluatedProperties": false}', "Unimplemented keys"),
        (ConstraintKind.JSON_SCHEMA, '{"type": "string", "pattern": "(a"}', "unclosed group"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}', "no text satisfies it; a .ref that leads only to itself"),
        (ConstraintKind.JSON_SCHEMA, '{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}', "leads only to itself"),
        (ConstraintKind.REGEX, r"[^\s\S]", "no text satisfies it$"),
        (ConstraintKind.REGEX, "(a", "regex cannot be used"), (ConstraintKind.REGEX, "a(?=b)", "look-around"),
        (ConstraintKind.REGEX, "(a)\\1", "backreferences"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(kind: ConstraintKind, text: str, finding: str) -> None:
    with pytest.raises(ConstraintError, match=finding) as caught:
        compiler().compile(Constraint(kind, text))
    assert str(caught.value).startswith(kind.value)
    assert "\n" not in str(caught.value)


HOSTILE = {
    "brackets": (ConstraintKind.JSON_SCHEMA, "[" * 60_000),
    "nesting": (ConstraintKind.JSON_SCHEMA, '{"items":' * 900 + "{}" + "}" * 900),
    "all_of": (ConstraintKind.JSON_SCHEMA, '{"allOf":[' * 90 + "{}" + "]}" * 90),
    "self_reference": (ConstraintKind.JSON_SCHEMA, '{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/a"}]}}}'),
    "product": (ConstraintKind.JSON_SCHEMA, json.dumps({
        "allOf": [{"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(4)]} for i in range(10)]
    })),
    "repeated": (ConstraintKind.REGEX, "(a{1,1000}){1,1000}"),
    "ambiguous": (ConstraintKind.REGEX, "(a|b|c|d|e)*" * 50 + "f{1,500}"),
    "dots": (ConstraintKind.REGEX, ".*" * 500 + "x"),
    "long": (ConstraintKind.REGEX, "\\w{5000}"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_soon_done_with(name: str) -> None:
    """Refused, or compiled and followed a little: never more than seconds, and never a long message."""
    kind, text = HOSTILE[name]
    begin_s = time.process_time()
    matcher, reason = None, ""
    try:
        matcher = compiler().compile(Constraint(kind, text))
    except ConstraintError as error:
        reason = str(error)
    assert len(reason) < MAX_REASON_CHARS + 100
    if matcher is not None:
        for _ in range(5):
            allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
            if not len(allowed):
                assert matcher.error
                break
            matcher.accept(int(allowed[-1]))
    assert time.process_time() - begin_s < 3.0


FAILS_WITHIN = {
    "many optional properties in one of two objects": (ConstraintKind.JSON_SCHEMA, json.dumps({
        "anyOf": [{"enum": [{"a": index} for index in range(1000)]}, {"enum": [{"b": index} for index in range(1200)]}],
    })),
    "a long text of a pattern": (
        ConstraintKind.JSON_SCHEMA,
        json.dumps({"type": "string", "minLength": 50_000, "pattern": "^(ab|c)*$"}),
    ),
    "twice as many": (ConstraintKind.REGEX, "a?" * 2000 + "a" * 2000),
    "far within": (ConstraintKind.REGEX, "(a{1,350}){1,350}"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS_WITHIN)
def test_what_would_fail_within_the_answer_is_refused(name: str) -> None:
    reason = compiler().why_not(Constraint(*FAILS_WITHIN[name]))
    assert reason is not None
    assert "could not go on behind token" in reason or "things may come next" in reason


@pytest.mark.parametrize("text", [json.dumps(PERSON), json.dumps(TREE), '{"type": "object"}', '{"enum": ["red", 7, null]}', "{}"])
def test_what_people_use_passes_the_check(text: str) -> None:
    assert compiler().why_not(Constraint(ConstraintKind.JSON_SCHEMA, text)) is None


@pytest.mark.parametrize("regex", ["", "a", "(yes|no)", "[a-z]{1000,}", "(\\w{1,50} ){1,50}", "\\d{4}-\\d{2}"])
def test_what_people_write_passes_the_check(regex: str) -> None:
    assert compiler().why_not(Constraint(ConstraintKind.REGEX, regex)) is None


def test_a_matcher_that_is_lost_allows_nothing() -> None:
    matcher = compiler().compile(Constraint(ConstraintKind.REGEX, "abc"))
    matcher.accept(EOS_ID)
    assert matcher.error
    assert not matcher.mask().any()
