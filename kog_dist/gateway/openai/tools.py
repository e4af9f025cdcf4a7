"""Which tools may be called, and the grammar that makes an answer a call where one is required."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kog_dist.gateway.openai.closed_schemas import closed
from kog_dist.gateway.openai.errors import invalid
from kog_dist.gateway.openai.parsers import ChosenCall, NamedCall
from kog_dist.gateway.openai.planning import schema_text
from kog_dist.gateway.openai.served import ServedModel
from kog_dist.gateway.reading.channels import FINAL_HEADER, call_header
from kog_dist.gateway.reading.reader import AnswerParser
from kog_dist.gateway.reading.styles import Reading
from kog_dist.json_schema import rewritten
from kog_dist.model.tokenizer import Tokenizer

_NO_PARAMETERS: Final = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool, whichever API it came by."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] | None

    def as_chat_tool(self) -> dict[str, Any]:
        """The form that chat templates render."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) if self.parameters is not None else {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request wants of its tools: those the model is told of, the schema of the answer, how an answer is read.

    `json_schema` is None where no call is required.
    """

    offered: tuple[Function, ...] = ()
    json_schema: str | None = None
    named: str | None = None  # the one function that must be called
    choosable: tuple[str, ...] = ()  # else one of these must be called
    reading: Reading = field(default_factory=Reading)  # where no call is enforced
    begins_with: str = ""  # what the prompt ends with, so that an enforced answer is one message

    def after(self, prompt_ids: Sequence[int], served: ServedModel) -> ToolUse:
        """The same for an answer that follows this prompt, which may end within a thought."""
        style = self.reading.style
        return replace(self, reading=replace(self.reading, begins=style.begins(served.tokenizer, prompt_ids)))

    def parser(self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int]) -> AnswerParser:
        """A reader for one choice."""
        if self.named is not None:
            return NamedCall(self.named)
        if self.choosable:
            return ChosenCall()
        return self.reading.parser(tokenizer, prompt_ids)


def tool_use(
    functions: Sequence[Function], mode: str, names: Sequence[str] | None, served: ServedModel, *,
    has_format: bool, has_one_call: bool = False,
) -> ToolUse:  # fmt: skip
    """`mode`: none, auto or required; `names`: only these functions count, None: all. `has_one_call`: the first call is all.

    Raises ApiError 400 for a name that no tool or two tools have, a choice without tools, or parameters that are no schema of
    an object.
    """
    usable = _usable(functions, mode, names)
    schemas = {function.name: _parameters(function) for function in usable}
    use = ToolUse(usable, reading=Reading(served.style, {} if has_format else schemas, has_one_call=has_one_call))
    if mode == "required":
        use = _enforced(use, schemas)
    if not served.has_channels:
        return use
    if use.named is not None:
        return replace(use, begins_with=call_header(use.named))
    if use.json_schema is not None or has_format:
        return replace(use, begins_with=FINAL_HEADER, reading=Reading())
    return use


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


def _enforced(use: ToolUse, schemas: Mapping[str, Mapping[str, Any]]) -> ToolUse:
    """The answer is a call."""
    names, enforced = tuple(schemas), [closed(schema) for schema in schemas.values()]
    if len(names) == 1:
        return replace(use, json_schema=schema_text(enforced[0], "tools"), named=names[0])
    return replace(use, json_schema=schema_text(_one_of(names, enforced), "tools"), choosable=names)


def _parameters(function: Function) -> dict[str, Any]:
    schema = dict(function.parameters) if function.parameters else dict(_NO_PARAMETERS)
    if schema.setdefault("type", "object") != "object":
        raise invalid("tools", f"tools: the parameters of {function.name} must be a schema of type object")
    return schema


def _one_of(names: Sequence[str], schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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


def _moved(schema: Mapping[str, Any], root: str) -> Any:
    """The schema with references to its own root made into references to where it stands now."""

    def refer(inner: dict[str, Any]) -> dict[str, Any]:
        place = inner.get("$ref")
        return inner | {"$ref": root + place[1:]} if isinstance(place, str) and place.startswith("#") else inner

    return rewritten(schema, refer)
