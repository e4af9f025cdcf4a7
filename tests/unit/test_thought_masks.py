"""Masks of answers that begin with a thought, and of grammars of calls."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kog_dist.rpc.messages import BadMessage, Generate
from kog_dist.workers.grammar.compiler import Constraint, ConstraintError, ConstraintKind, constraint_of
from tests.unit.test_grammar_compiler import EOS_ID, VOCAB_SIZE, compiler, random_answer, tokenizer

END_ID = 200  # any token does


def allowed(matcher: Any) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist())


def test_a_thought_is_free_until_it_ends() -> None:
    matcher = compiler().compile(Constraint(ConstraintKind.REGEX, "[0-9]{2}", END_ID))
    free = allowed(matcher)
    assert END_ID in free
    assert EOS_ID not in free, "an answer does not end within a thought"
    assert max(free) < 4096, "ids without a text"
    assert len(free) > 4000
    for token_id in (300, 301, 302):
        matcher.accept(token_id)
        assert allowed(matcher) == free
    matcher.accept(END_ID)
    digits = allowed(matcher)
    assert all(tokenizer().token_bytes(token_id).isdigit() for token_id in digits)
    [four] = tokenizer().encode("4")
    matcher.accept(four)
    matcher.accept(four)
    assert EOS_ID in allowed(matcher)


@pytest.mark.parametrize("most", [0, 3])
def test_a_thought_is_ended_by_its_limit(most: int) -> None:
    matcher = compiler().compile(Constraint(ConstraintKind.THOUGHT, "", END_ID, most))
    for _ in range(most):
        assert len(allowed(matcher)) > 4000
        matcher.accept(300)
    assert allowed(matcher) == {END_ID}
    matcher.accept(END_ID)
    assert allowed(matcher) >= set(range(VOCAB_SIZE)), "then everything may come, an end too"
    matcher.accept(300)
    assert allowed(matcher) >= set(range(VOCAB_SIZE))
    assert matcher.error == ""


def test_a_schema_behind_a_thought_may_follow_line_ends() -> None:
    matcher = compiler().compile(Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "boolean"}', END_ID))
    matcher.accept(END_ID)
    for token_id in tokenizer().encode("\n\ntrue"):
        assert token_id in allowed(matcher)
        matcher.accept(token_id)
    assert allowed(matcher) == {EOS_ID}


def grammar(lark: str, *schemas: Any) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, json.dumps({"lark": lark, "schemas": schemas}))


def test_a_grammar_has_texts_tokens_and_schemas() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    constraint = grammar(f'start: <[{END_ID}]> "f " schema_0 (";" schema_1)?', schema, {"enum": ["x"], "format": "no such"})
    for seed in range(4):
        answer = random_answer(constraint, seed)
        assert answer is not None
        first, _, rest = answer.partition("f ")
        assert first == tokenizer().decode([END_ID])
        assert json.loads(rest.partition(";")[0])["a"] <= 9


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.GRAMMAR, "{"),
        Constraint(ConstraintKind.GRAMMAR, '{"lark": "start: x", "schemas": []}'),
        grammar("start: schema_0", {"type": "nonsense"}),
        grammar("start: schema_0", 5),
    ],
)
def test_a_wrong_grammar_is_refused(constraint: Constraint) -> None:
    with pytest.raises(ConstraintError, match=r"^grammar "):
        compiler().compile(constraint)


def test_what_a_request_may_ask_for() -> None:
    asked = Generate("r", prompt="x", grammar="{}", thought_end=5, thought_tokens=9)
    assert constraint_of(asked) == Constraint(ConstraintKind.GRAMMAR, "{}", 5, 9)
    assert constraint_of(Generate("r", prompt="x", thought_end=5)) == Constraint(ConstraintKind.THOUGHT, "", 5, None)
    for fields, words in (
        ({"grammar": "{}", "regex": "x"}, "regex and grammar exclude"), ({"thought_tokens": 5}, "needs thought_end"),
    ):  # fmt: skip
        with pytest.raises(BadMessage, match=words):
            Generate("r", prompt="x", **fields)


# ---- what is forced ----
PROPERTIES = {"full_name": {"type": "string", "maxLength": 5}, "kind": {"enum": ["buyer", "seller"]}}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["full_name", "kind"], "additionalProperties": False}
FORCING = [
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    Constraint(ConstraintKind.REGEX, "order [0-9]{2} is (sent|stopped)"),
    grammar(f'start: <[{END_ID}]> "call f with " schema_0', SCHEMA),
    Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA), END_ID, 3),
    Constraint(ConstraintKind.THOUGHT, "", END_ID, 3),
]


@pytest.mark.parametrize("constraint", FORCING)
def test_masks_allow_what_is_forced_and_nothing_else(constraint: Constraint) -> None:
    """And are the same as where nobody asks what is forced."""
    rng, num_forced = np.random.default_rng(3), 0
    matcher, unasked = compiler().compile(constraint), compiler().compile(constraint)
    expected: list[int] = []
    for _ in range(60):
        forced = matcher.forced()
        assert forced[: len(expected)] == expected
        found = allowed(matcher)
        assert found == allowed(unasked)
        assert not forced or found == {forced[0]}
        num_forced += len(forced) > 0
        if EOS_ID in found:
            break
        token_id = int(rng.choice(sorted(found)))
        matcher.accept(token_id)
        unasked.accept(token_id)
        expected = forced[1:]
    assert num_forced >= (1 if constraint.kind is ConstraintKind.THOUGHT else 3)
