"""Which tools may be called, and the grammar that makes an answer a call where one is required."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Final

from kog_dist.gateway.openai.closed_schemas import closed
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.parsers import ChosenCall, NamedCall
from kog_dist.gateway.openai.planning import bounded, schema_text
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.openai.thinking import Begun
from kog_dist.gateway.reading.call_grammar import CallGrammar
from kog_dist.gateway.reading.reader import AnswerParser
from kog_dist.gateway.reading.styles import Reading
from kog_dist.json_schema import rewritten
from kog_dist.model.tokenizer import Tokenizer
from kog_dist.records import dataclass

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool, whichever API it came by."""

    name: str
    description: str | None
    parameters: Mapping[str, object] | None

    def as_chat_tool(self) -> dict[str, object]:
        """The form that chat templates render."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) if self.parameters is not None else {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of its tools. `offered`: those the model is told of. `required`: one of these must be called; their
    parameters. `bare`: the names of those where the answer is nothing but JSON, of a model that has no form of its own for calls.
    """

    offered: tuple[Function, ...] = ()
    reading: Reading = field(default_factory=Reading)
    required: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    bare: tuple[str, ...] = ()

    @property
    def is_enforced(self) -> bool:
        """Whether a grammar follows a thought."""
        return bool(self.required) and not self.bare

    def after(self, begun: Begun) -> ToolUse:
        """The same for an answer that begins so."""
        return replace(self, reading=replace(self.reading, begins=begun.begins))

    def fields(self, begun: Begun, answer_schema: str | None, served: ServedModel) -> dict[str, object]:
        """The field of Generate that enforces a call, or an answer that satisfies a schema. Raises ApiError 400 above limits."""
        if self.bare:
            names, schemas = self.bare, list(self.required.values())
            return {"json_schema": schema_text(schemas[0] if len(names) == 1 else _one_of(names, schemas), "tools")}
        grammar = CallGrammar(served.tokenizer, behind_thought=begun.thought_end is not None, thought_end=begun.thought_letters)
        if self.required:
            template = served.chat_template
            source = "" if template is None else template.tool_source
            style, several = self.reading.style.tools, not self.reading.has_one_call
            return {"grammar": bounded(grammar.calls(style, source, self.required, several=several), "tools")}
        if answer_schema is not None and (served.has_channels or begun.thought_letters is not None):
            answer = grammar.answer(json.loads(answer_schema), in_channel=served.has_channels)
            return {"grammar": bounded(answer, "response_format")}
        return {"json_schema": answer_schema}

    def parser(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> AnswerParser:
        """A reader for one choice."""
        if self.bare:
            return NamedCall(self.bare[0]) if len(self.bare) == 1 else ChosenCall()
        return self.reading.parser(tokenizer, prompt_ids)


def tool_use(
    functions: Sequence[Function],
    mode: str,
    names: Sequence[str] | None,
    served: ServedModel,
    *,
    has_format: bool,
    has_one_call: bool = False,
) -> ToolUse:
    """`mode`: none, auto or required; `names`: only these functions count, None: all. `has_one_call`: the first call is all.

    Raises ApiError 400 for a name that no tool or two tools have, a choice without tools, or parameters that are no schema of
    an object.
    """
    usable = _usable(functions, mode, names)
    schemas = {function.name: _parameters(function) for function in usable}
    is_required = mode == "required"
    called = schemas if is_required or not has_format else {}
    use = ToolUse(usable, Reading(served.style, called, has_one_call=has_one_call))
    if not is_required:
        return use
    is_bare = served.style.tools == "none"
    required = {name: closed(schema) for name, schema in schemas.items()}
    return replace(use, required=required, bare=tuple(required) if is_bare else ())


def _usable(functions: Sequence[Function], mode: str, names: Sequence[str] | None) -> tuple[Function, ...]:
    """The functions that may be called; none with `mode` none."""
    by_name = {function.name: function for function in functions}
    if len(by_name) < len(functions):
        raise invalid("tools", "tools: two functions have the same name")
    for name in names or ():
        if name not in by_name:
            raise invalid("tool_choice", f"tool_choice names {name}, which is not in tools")
    usable = tuple(functions) if names is None else tuple(by_name[name] for name in dict.fromkeys(names))
    if mode == "required" and not usable:
        raise invalid("tool_choice", "tool_choice requires a call, but there are no tools")
    return () if mode == "none" else usable


def _parameters(function: Function) -> dict[str, object]:
    schema = dict(function.parameters) if function.parameters else dict(_NO_PARAMETERS)
    if schema.setdefault("type", "object") != "object":
        raise invalid("tools", f"tools: the parameters of {function.name} must be a schema of type object")
    return schema


def _one_of(names: Sequence[str], schemas: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The schema of `{"name": ..., "arguments": ...}`; each function's schema moves into $defs, with its references."""
    branches = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{idx}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for idx, name in enumerate(names)
    ]
    return {"anyOf": branches, "$defs": {str(idx): _moved(schema, f"#/$defs/{idx}") for idx, schema in enumerate(schemas)}}


def _moved(schema: Mapping[str, Any], root: str) -> object:
    """The schema with references to its own root made into references to where it stands now."""

    def refer(inner: dict[str, object]) -> dict[str, object]:
        place = inner.get("$ref")
        return inner | {"$ref": root + place[1:]} if isinstance(place, str) and place.startswith("#") else inner

    return rewritten(schema, refer)
