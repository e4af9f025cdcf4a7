"""Whatever a grammar of required calls allows, the reader finds as a call whose arguments satisfy the schema."""

from __future__ import annotations

import functools
import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from kog_dist.gateway.reading.call_grammar import CallGrammar
from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta
from kog_dist.gateway.reading.json_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from kog_dist.gateway.reading.styles import Reading, Style
from kog_dist.model.tokenizer import CHANNEL_TAGS, Tokenizer
from kog_dist.workers.grammar.compiler import Constraint, ConstraintKind, GrammarCompiler

NOTES = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # have a text, as in Qwen's vocabulary
SPECIALS = (*CHANNEL_TAGS, "[TOOL_CALLS]", "[ARGS]", CALLS_BEGIN, CALL_BEGIN, SEPARATOR, CALL_END, CALLS_END)
LARGEST = 9


def closed(**properties: Any) -> dict[str, Any]:
    required = [key for key in properties if not key.startswith("maybe")]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


FUNCTIONS: dict[str, dict[str, Any]] = {
    "ping": closed(),
    "pick": closed(
        size={"enum": ["low", "high"]}, count={"type": "integer", "maximum": LARGEST, "minimum": 0}, maybe_on={"type": "boolean"},
        maybe_all={"type": "array", "items": {"enum": [1, "two"]}, "maxItems": 2}, maybe={"type": ["null", "boolean"]},
    ),
    "coded": closed(code={"type": "string", "pattern": "^[a-c]{2}$"}),
    "shared": {**closed(at={"$ref": "#/$defs/at"}), "$defs": {"at": closed(x={"type": "boolean"})}},
}  # fmt: skip
FORMS = (
    ("hermes", ""), ("qwen3_coder", ""), ("llama3_json", ""), ("mistral", ""), ("mistral", "[ARGS]"), ("deepseek", "```json"),
    ("deepseek", ""), ("channels", ""),
)  # fmt: skip


def with_tags(names: bool) -> Tokenizer:
    """The demo's tokenizer; `names`: tags are tokens of it."""
    raw = json.loads((Path(str(resources.files("kog_dist"))) / "models" / "demo" / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    first = 1 + max(raw["model"]["vocab"].values())
    tags = (*SPECIALS, *NOTES) if names else CHANNEL_TAGS
    raw["added_tokens"] += [
        {"id": first + idx, "content": tag, "special": tag not in NOTES, **flags} for idx, tag in enumerate(tags)
    ]  # fmt: skip
    return Tokenizer(json.dumps(raw), (0,))


@functools.cache
def compiler(names: bool) -> tuple[Tokenizer, GrammarCompiler]:
    tokenizer = with_tags(names)
    return tokenizer, GrammarCompiler(tokenizer, tokenizer.num_ids)


def drawn(constraint: Constraint, names: bool, rng: np.random.Generator) -> list[int]:
    """Tokens drawn from the masks; an end is taken where there is one."""
    tokenizer, made = compiler(names)
    matcher, ids = made.compile(constraint), list[int]()
    while len(ids) < 600:
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        assert len(allowed), (matcher.error, tokenizer.decode(ids))
        if 0 in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return ids
        ids.append(int(rng.choice(allowed[allowed != 0])))
        matcher.accept(ids[-1])
    raise AssertionError(tokenizer.decode(ids))


def calls_of(deltas: list[Delta]) -> list[tuple[str, str]]:
    """Name and arguments; there may be nothing else."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            found.append((delta.name, ""))
        else:
            assert isinstance(delta, CallArguments), delta
            found[-1] = (found[-1][0], found[-1][1] + delta.text)
    return found


def constraint_for(tools: str, source: str, names: bool, several: bool, behind: bool = False) -> Constraint:
    grammar = CallGrammar(compiler(names)[0], behind_thought=behind)
    return Constraint(ConstraintKind.GRAMMAR, grammar.calls(tools, source, FUNCTIONS, several=several))


@pytest.mark.parametrize("names", [True, False], ids=["tokens", "letters"])
@pytest.mark.parametrize(("tools", "source"), FORMS)
def test_what_is_enforced_is_read(tools: str, source: str, names: bool) -> None:
    rng, seen = np.random.default_rng(5), set[str]()
    tokenizer = compiler(names)[0]
    style = Style("channels" if tools == "channels" else "think", tools)
    for several in (False, True) * 6:
        ids = drawn(constraint_for(tools, source, names, several), names, rng)
        reader = Reading(style, FUNCTIONS).parser(tokenizer, ())
        text = tokenizer.stream()
        deltas = [delta for token_id in ids for delta in reader.push((token_id,), text.push(token_id))]
        calls = calls_of(deltas + list(reader.finish()))
        assert calls, tokenizer.decode(ids)
        assert len(calls) == 1 or several
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), FUNCTIONS[name])
            seen.add(name)
    assert len(seen) > 2


def test_letters_may_end_a_thought() -> None:
    """Of a vocabulary that has no token for it; also within a token that goes on."""
    tokenizer, made = compiler(False)
    grammar = CallGrammar(tokenizer, behind_thought=False, thought_end="</think>")
    text = grammar.answer(closed(a={"type": "boolean"}), in_channel=False)
    matcher = made.compile(Constraint(ConstraintKind.GRAMMAR, text))
    for token_id in tokenizer.encode('Hm {"b</think>\n\n{"a":true}', add_special_tokens=False):
        assert matcher.mask()[token_id // 32] >> token_id % 32 & 1, tokenizer.decode([token_id])
        matcher.accept(token_id)
    assert matcher.mask()[0] & 1, "it may end"


WRONG: list[dict[str, Any]] = [
    {"required": None}, {"required": ["b"]}, {"required": [["a"]]}, {"minProperties": 2},
    {"additionalProperties": {"type": "string"}},
    *({"properties": {"a": value}} for value in (
        True, {"enum": 5}, {"type": "string", "enum": []}, {"anyOf": {"type": "string"}}, {"$ref": "#/properties/a"},
        {"enum": ["<"]}, {"type": "string", "format": "date"},
    )),
    {"properties": {"a>": {"type": "string"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", WRONG, ids=str)
def test_what_xml_cannot_enforce_is_json(schema: dict[str, Any]) -> None:
    """Wrong schemas, too: who compiles them says what is wrong."""
    given = {"type": "object", "properties": {"a": {"type": "string"}}} | schema
    text = CallGrammar(None, behind_thought=False).calls("qwen3_coder", "", {"f": given}, several=False)
    assert "arguments" in json.loads(text)["lark"]
    assert json.loads(text)["schemas"] == [given]


def test_text_of_a_parameter_is_free_up_to_its_tag() -> None:
    tokenizer, made = compiler(True)
    function = closed(text={"type": "string"}, maybe={"anyOf": [{"type": "string"}, {"type": "null"}]})
    grammar = CallGrammar(tokenizer, behind_thought=True).calls("qwen3_coder", "", {"f": function}, several=False)
    said = 'if a < b: "x"\n</param'
    text = f"\n\n<tool_call>\n<function=f>\n<parameter=text>\n{said}\n</parameter>\n</function>\n</tool_call>"
    matcher = made.compile(Constraint(ConstraintKind.GRAMMAR, grammar))
    ids = tokenizer.encode(text, add_special_tokens=False)
    for token_id in ids:
        assert matcher.mask()[token_id // 32] >> token_id % 32 & 1, tokenizer.decode([token_id])
        matcher.accept(token_id)
    reader = Reading(Style("think", "qwen3_coder"), {"f": function}).parser(tokenizer, ())
    [(name, arguments)] = calls_of([*reader.push(ids, text), *reader.finish()])
    assert (name, json.loads(arguments)) == ("f", {"text": said})
