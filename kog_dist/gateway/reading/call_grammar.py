"""Grammars of required calls, each in the form that the model itself writes; the reader finds them as it finds others."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from kog_dist.gateway.reading.channels import CHANNEL, MESSAGE, START
from kog_dist.gateway.reading.json_calls import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR
from kog_dist.gateway.reading.reader import TOOL_CALL, TOOL_CALLS
from kog_dist.gateway.reading.typed_values import types_of
from kog_dist.gateway.reading.xml_call import TOOL_CALL_END
from kog_dist.model.tokenizer import Tokenizer

_LINES: Final = r"/\n{0,2}/"  # what models have behind a thought
# What a schema may have whose strings are written as they are; the others say something that only JSON can enforce.
_NOTES: Final = frozenset({"type", "title", "description", "default", "examples", "enum", "const", "anyOf", "oneOf"})
_OBJECT: Final = frozenset(
    {
        "type",
        "title",
        "description",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "$schema",
        "strict",
    }
)


class CallGrammar:
    """Rules and schemas of one grammar, in the form that workers/grammar/compiler.py takes."""

    def __init__(self, tokenizer: Tokenizer | None, *, behind_thought: bool, thought_end: str | None = None) -> None:
        """`behind_thought`: a thought comes first, which the grammar does not see. `thought_end`: or it does, and these letters
        end it.
        """
        self._tokenizer, self._behind_thought, self._thought_end = tokenizer, behind_thought, thought_end
        self._rules: list[str] = []
        self._schemas: list[Mapping[str, object]] = []

    def text(self, start: str) -> str:
        """All of it."""
        return json.dumps({"lark": "\n".join([f"start: {start}", *self._rules]), "schemas": self._schemas}, separators=(",", ":"))

    def tag(self, name: str) -> str:
        """The token, or the letters where the vocabulary has none."""
        token_id = None if self._tokenizer is None else self._tokenizer.id_of(name)
        return json.dumps(name) if token_id is None else f"<[{token_id}]>"

    def schema(self, schema: Mapping[str, Any]) -> str:
        """The rule of JSON that satisfies it."""
        self._schemas.append(schema)
        return f"schema_{len(self._schemas) - 1}"

    def rule(self, body: str, attributes: str = "") -> str:
        """A rule of its own."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    # ---- families ----
    def calls(self, tools: str, source: str, functions: Mapping[str, Mapping[str, Any]], *, several: bool) -> str:
        """One call of one of the functions, or `several`. `source`: the chat template, which knows the dialect."""
        begin, call, between, end = self._form(tools, source)
        one = self.rule(" | ".join(call(name, schema) for name, schema in functions.items()))
        more = f" ({between} {one})*" if several and between else ""
        lead = "" if tools == "channels" else self._lead()
        return self.text(f"{lead} {begin} {one}{more} {end}")

    def _lead(self) -> str:
        """What comes before everything else."""
        if self._thought_end is not None:
            return f"{self.rule('/(?s:.*)/', f'[suffix={json.dumps(self._thought_end)}]')} {_LINES}"
        return _LINES if self._behind_thought else ""

    def answer(self, schema: Mapping[str, Any], *, in_channel: bool) -> str:
        """JSON; `in_channel`: as the message of gpt-oss that the user reads."""
        if not in_channel:
            return self.text(f"{self._lead()} {self.schema(schema)}")
        return self.text(f'{self._channel()} "final" {self.tag(MESSAGE)} {self.schema(schema)}')

    def _form(self, tools: str, source: str) -> tuple[str, Callable[[str, Mapping[str, object]], str], str, str]:
        """What comes before the first call, a call, what is between two, what comes behind the last."""
        if tools == "channels":
            return "", self._in_channel, "", ""
        if tools == "mistral" and "[ARGS]" in source:
            tag, separator = self.tag(TOOL_CALLS), self.tag("[ARGS]")
            return "", lambda name, schema: f"{tag} {_quoted(name)} {separator} {self.schema(schema)}", '""', ""
        if tools == "mistral":
            return f'{self.tag(TOOL_CALLS)} "["', self._json("arguments"), '", "', '"]"'
        if tools == "deepseek":
            return self.tag(CALLS_BEGIN), self._deepseek("```json" in source), '"\\n"', self.tag(CALLS_END)
        if tools == "llama3_json":
            return "", self._json("parameters"), '"; "', ""
        if tools == "qwen3_coder":
            return "", self._xml_or_json, '"\\n"', ""
        return "", self._in_tag, '"\\n"', ""

    def _json(self, key: str) -> Callable[[str, Mapping[str, object]], str]:
        def call(name: str, schema: Mapping[str, Any]) -> str:
            head = f'{{"name": "{name}", "{key}": '
            return f'{_quoted(head)} {self.schema(schema)} "}}"'

        return call

    def _in_tag(self, name: str, schema: Mapping[str, Any]) -> str:
        inner = self._json("arguments")(name, schema)
        return f'{self.tag(TOOL_CALL)} "\\n" {inner} "\\n" {self.tag(TOOL_CALL_END)}'

    def _deepseek(self, is_fenced: bool) -> Callable[[str, Mapping[str, object]], str]:
        def call(name: str, schema: Mapping[str, Any]) -> str:
            before, behind = (f"{name}\n```json\n", "\n```") if is_fenced else ("", "")
            kind = "function" if is_fenced else name
            inner = f"{_quoted(kind)} {self.tag(SEPARATOR)} {_quoted(before)} {self.schema(schema)} {_quoted(behind)}"
            return f"{self.tag(CALL_BEGIN)} {inner} {self.tag(CALL_END)}"

        return call

    def _channel(self) -> str:
        return f'{self.tag(START)} "assistant" {self.tag(CHANNEL)}' if self._behind_thought else self.tag(CHANNEL)

    def _in_channel(self, name: str, schema: Mapping[str, Any]) -> str:
        to = _quoted(f"commentary to=functions.{name} ")
        return f'{self._channel()} {to} {self.tag("<|constrain|>")} "json" {self.tag(MESSAGE)} {self.schema(schema)}'

    # ---- XML ----
    def _xml_or_json(self, name: str, schema: Mapping[str, Any]) -> str:
        """XML, where it can say what the schema asks for; else JSON in the same tag, which the reader knows as well."""
        values = _xml_values(schema)
        if values is None:
            return self._in_tag(name, schema)
        required = schema.get("required", ())
        parameters = [(key, self._parameter(key, value)) for key, value in values.items()]
        inner = " ".join(rule if key in required else f"{rule}?" for key, rule in parameters)
        head = _quoted(f"\n<function={name}>\n")
        return f'{self.tag(TOOL_CALL)} {head} {inner} "</function>\\n" {self.tag(TOOL_CALL_END)}'

    def _parameter(self, key: str, value: Mapping[str, object] | list[str] | None) -> str:
        """`value`: a schema of what is no string; words; None: any text."""
        head, tail = _quoted(f"<parameter={key}>\n"), _quoted("\n</parameter>\n")
        if value is None:
            text = self.rule("/(?s:.*)/", '[suffix="</parameter>"]')
            return self.rule(f'{head} {text} "\\n"')
        inner = " | ".join(map(_quoted, value)) if isinstance(value, list) else self.schema(value)
        return self.rule(f"{head} ({inner}) {tail}")


def _xml_values(schema: Mapping[str, Any]) -> dict[str, Mapping[str, object] | list[str] | None] | None:
    """How each parameter's value is enforced; None if XML cannot enforce the schema."""
    properties = schema.get("properties", {})
    if (
        not schema.keys() <= _OBJECT
        or not isinstance(properties, Mapping)
        or schema.get("additionalProperties") not in (None, False)
    ):
        return None
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        return None
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found: dict[str, Mapping[str, object] | list[str] | None] = {}
    for key, value in properties.items():
        types = types_of(value, schema)
        if (
            not isinstance(value, Mapping)
            or any(character in key for character in '>\n<{"')
            or '"#/properties' in json.dumps(value)
        ):
            return None
        if "string" not in types:
            found[key] = {**value, **shared}
        elif types <= {"string", "null"} and value.keys() <= _NOTES:
            words = value.get("enum", [value["const"]] if "const" in value else None)
            if not _are_plain(value) or not _are_words(words):
                return None
            found[key] = words
        else:
            return None
    return found


def _are_plain(value: Mapping[str, object]) -> bool:
    """Whether branches say nothing but types."""
    given = [value[key] for key in ("anyOf", "oneOf") if key in value]
    return all(
        isinstance(branches, list)
        and all(isinstance(branch, Mapping) and branch.keys() <= {"type", "title", "description"} for branch in branches)
        for branches in given
    )


def _are_words(words: object) -> bool:
    """Whether an enum, if there is one, is of texts that are read again as they are."""
    return words is None or (
        isinstance(words, list) and bool(words) and all(isinstance(word, str) and _is_plain(word) for word in words)
    )


def _is_plain(word: str) -> bool:
    """Whether a word is read again as it is."""
    return bool(word) and "<" not in word and word == word.strip("\n") and word.lower() not in ("null", "none")


def _quoted(text: str) -> str:
    """A text of the grammar."""
    return json.dumps(text)
