"""What a reader makes of pieces of text, in a form that a test can be read by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore
from kog_dist.gateway.reading.reader import AnswerParser
from kog_dist.gateway.reading.styles import Reading, Style

TEXT = {"type": "string"}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "ping": {"type": "object", "properties": {}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "write": {
        "type": "object",
        "properties": {
            "path": TEXT, "text": TEXT, "mode": {"type": ["integer", "null"]}, "lines": {"type": "array"},
            "options": {"$ref": "#/$defs/options"}, "force": {"type": "boolean"}, "label": {"anyOf": [TEXT, {"type": "null"}]},
            "scale": {"type": "number"}, "level": {"enum": ["low", "high"]}, "any": {},
        },
        "$defs": {"options": {"type": "object"}},
    },
}  # fmt: skip


def parser(
    reasoning: str = "think", tools: str = "hermes", begins: str = "free", *, thinks: bool = True, **more: Any
) -> AnswerParser:
    """A reader of text alone, where letters are tags."""
    return Reading(Style(reasoning, tools, thinks), FUNCTIONS, begins, **more).parser(None, ())


def deltas_of(reader: AnswerParser, pieces: Sequence[str]) -> list[Delta]:
    """Everything that it says."""
    return [delta for piece in pieces for delta in reader.push((), piece)] + list(reader.finish())


def said(reader: AnswerParser, pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Kind, or the function's name, and text of each part; neighbours of one kind joined."""
    return parts_of(deltas_of(reader, pieces))


def parts_of(deltas: Sequence[Delta]) -> list[tuple[str, str]]:
    """The same of deltas. Arguments must be JSON objects."""
    found: list[tuple[str, str]] = []
    for delta in deltas:
        match delta:
            case CallStart(idx, name):
                assert idx == sum(kind not in ("content", "reasoning") for kind, _ in found)
                found.append((name, ""))
            case CallArguments(idx, text):
                assert idx == sum(kind not in ("content", "reasoning") for kind, _ in found) - 1
                found[-1] = (found[-1][0], found[-1][1] + text)
            case ThoughtBefore():
                assert [kind for kind, _ in found] == ["content"]
                found = [("reasoning", found[0][1])]
            case TextDelta(text) | ReasoningDelta(text):
                kind = "content" if isinstance(delta, TextDelta) else "reasoning"
                if found and found[-1][0] == kind:
                    found[-1] = (kind, found[-1][1] + text)
                else:
                    found.append((kind, text))
    for kind, text in found:
        if kind not in ("content", "reasoning"):
            assert isinstance(json.loads(text), dict), text
    return found
