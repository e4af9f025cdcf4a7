"""What of a conversation its prompt does not show: templates leave out without a word what they do not know."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MOST_NAMED: Final = 16
_THOUGHT_END: Final = "</think>"  # templates leave out what came before it in an earlier answer, on purpose


def unseen_fields(
    messages: Sequence[Mapping[str, object]], tools: Sequence[Mapping[str, object]], text: str, param: str
) -> list[str]:
    """Paths of messages' fields and of tools that are not in the text of a prompt, at most 16: contents, names, calls.

    What a template changes on its way (blanks, line ends, JSON) is there all the same. Reasoning of earlier answers and ids of
    calls are no part of what is said.
    """
    shown = _Shown(text)
    found: list[str] = []
    for path, said in (*_said(messages, param), *_said_of_tools(tools)):
        if len(found) == MOST_NAMED:
            break
        if path not in found and not shown.has(said):
            found.append(path)
    return found


def _said(messages: Sequence[Mapping[str, Any]], param: str) -> Iterator[tuple[str, str]]:
    for idx, message in enumerate(messages):
        path, content = f"{param}[{idx}]", message["content"]
        for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
            yield f"{path}.content", part.rpartition(_THOUGHT_END)[2] if message["role"] == "assistant" else part
        if "name" in message:
            yield f"{path}.name", message["name"]
        for place, call in enumerate(message.get("tool_calls", ())):
            for said in (call["function"]["name"], *_strings(call["function"]["arguments"])):
                yield f"{path}.tool_calls[{place}]", said


def _said_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Names, descriptions and parameters: templates write the rest of a schema in ways of their own."""
    for idx, tool in enumerate(tools):
        function = tool["function"]
        properties = function["parameters"].get("properties")
        for said in (function["name"], function.get("description", ""), *(properties if isinstance(properties, dict) else ())):
            yield f"tools[{idx}]", said


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class _Shown:
    """A text in which strings are looked for, most of them in the order in which they stand there."""

    def __init__(self, text: str) -> None:
        self._text, self._place = text, 0

    def has(self, said: str) -> bool:
        """Whether it is there, as it is, as JSON, or line by line."""
        said = said.strip()
        if self._find(said) or self._find(json.dumps(said, ensure_ascii=False)[1:-1]) or self._find(json.dumps(said)[1:-1]):
            return True
        lines = [line.strip() for line in said.splitlines()]
        return len(lines) > 1 and all(map(self._find, lines))

    def _find(self, said: str) -> bool:
        place = self._text.find(said, self._place)
        if place < 0 and (place := self._text.find(said)) < 0:
            return False
        self._place = place
        return True
