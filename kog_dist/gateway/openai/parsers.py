"""An answer's text, piece by piece, as content and tool calls. However it is cut, the same deltas come out when put together."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name`; `idx` counts the answer's calls."""

    idx: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of that call's arguments."""

    idx: int
    text: str


Delta: TypeAlias = TextDelta | ReasoningDelta | CallStart | CallArguments


class AnswerParser(Protocol):
    """Reads one choice's text."""

    num_calls: int

    def push(self, text: str) -> Sequence[Delta]:
        """What is certain with this piece."""

    def finish(self) -> Sequence[Delta]:
        """What was held back, when the answer ends."""


class PlainText:
    """No calls."""

    num_calls = 0

    def push(self, text: str) -> Sequence[Delta]:
        """The text as it is."""
        return (TextDelta(text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        """Nothing is held back."""
        return ()


class NamedCall:
    """The whole answer is the arguments of one function: the grammar sees to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def push(self, text: str) -> Sequence[Delta]:
        """Arguments, begun by the call with the first piece."""
        if not text:
            return ()
        if self.num_calls:
            return (CallArguments(0, text),)
        self.num_calls = 1
        return CallStart(0, self._name), CallArguments(0, text)

    def finish(self) -> Sequence[Delta]:
        """Nothing is held back."""
        return ()


# Names are letters, digits, - and _, so the grammar can write them in one way only.
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class ChosenCall:
    """The whole answer is `{"name": ..., "arguments": {...}}`: the grammar sees to it. An answer cut before that is content."""

    def __init__(self) -> None:
        self._head = ""
        self._arguments: _ObjectEnd | None = None
        self.num_calls = 0

    def push(self, text: str) -> Sequence[Delta]:
        """The call, then the arguments up to their closing brace."""
        if self._arguments is not None:
            kept = self._arguments.take(text)
            return (CallArguments(0, kept),) if kept else ()
        self._head += text
        match = _HEAD.match(self._head)
        if match is None:
            return ()
        rest, self._head = self._head[match.end() :], ""
        self._arguments, self.num_calls = _ObjectEnd(), 1
        return CallStart(0, match[1]), CallArguments(0, self._arguments.take(rest))

    def finish(self) -> Sequence[Delta]:
        """The beginning of an answer that was cut before its arguments."""
        held, self._head = self._head, ""
        return (TextDelta(held),) if held else ()


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = self._is_over = False

    def take(self, text: str) -> str:
        """The part of `text` that belongs to the object."""
        if self._is_over:
            return ""
        for idx, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped, self._is_in_string = character == "\\", character != '"'
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._is_over = True
                    return text[: idx + 1]
        return text


_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_MAX_CALL: Final = 1 << 18  # characters up to the closing tag; what is longer is text


class TaggedCalls:
    """Text with calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; what is no such call stays text.

    A call is told once it is complete. Blanks right after a call are left out.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_after_call = False
        self.num_calls = 0

    def push(self, text: str) -> Sequence[Delta]:
        """Content and complete calls."""
        self._held += text
        deltas: list[Delta] = []
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip()
            begin = self._held.find(_OPEN)
            self._tell(deltas, begin if begin >= 0 else len(self._held) - overlap(self._held, _OPEN))
            if begin < 0:
                return deltas
            end = self._held.find(_CLOSE, 0, _MAX_CALL)
            if end < 0 and len(self._held) < _MAX_CALL:
                return deltas
            call = self._call(self._held[len(_OPEN) : end]) if end >= 0 else None
            if call is None:
                self._tell(deltas, len(_OPEN))
                continue
            deltas += [CallStart(self.num_calls, call[0]), CallArguments(self.num_calls, call[1])]
            self.num_calls += 1
            self._held, self._is_after_call = self._held[end + len(_CLOSE) :], True

    def finish(self) -> Sequence[Delta]:
        """A call that was cut off is text."""
        deltas: list[Delta] = []
        self._tell(deltas, len(self._held))
        return deltas

    def _tell(self, deltas: list[Delta], length: int) -> None:
        """Give out so many of the held characters as text."""
        if length:
            deltas.append(TextDelta(self._held[:length]))
            self._held, self._is_after_call = self._held[length:], False

    def _call(self, inner: str) -> tuple[str, str] | None:
        """Name and arguments of a call of a known function."""
        try:
            call = json.loads(inner)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
            return None
        name = call.get("name")
        if not isinstance(name, str) or name not in self._names:
            return None
        return name, json.dumps(call["arguments"], ensure_ascii=False)


def overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    return next((length for length in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:length])), 0)
