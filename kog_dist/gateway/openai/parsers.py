"""Answers that a grammar makes a call from beginning to end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, TextDelta
from kog_dist.gateway.reading.json_text import JsonText


class NamedCall:
    """The whole answer is the arguments of one function: the grammar sees to it."""

    num_reasoning_tokens = 0
    is_enough = False

    def __init__(self, name: str) -> None:
        self._name, self._arguments = name, JsonText()
        self.num_calls = 0

    def push(self, token_ids: Sequence[int], text: str) -> Sequence[Delta]:
        """Arguments, begun by the call with the first piece."""
        if not text:
            return ()
        begun = () if self.num_calls else (CallStart(0, self._name),)
        self.num_calls = 1
        return (*begun, *_told(_taken(self._arguments, text)))

    def finish(self) -> Sequence[Delta]:
        """What makes JSON of arguments that were cut."""
        return _told(_rest(self._arguments)) if self.num_calls else ()


# Names are letters, digits, - and _, so the grammar can write them in one way only.
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class ChosenCall:
    """The whole answer is `{"name": ..., "arguments": {...}}`: the grammar sees to it. An answer cut before that is content."""

    num_reasoning_tokens = 0
    is_enough = False

    def __init__(self) -> None:
        self._head = ""
        self._arguments: JsonText | None = None
        self.num_calls = 0

    def push(self, token_ids: Sequence[int], text: str) -> Sequence[Delta]:
        """The call, then the arguments up to their closing brace."""
        if self._arguments is not None:
            return _told(_taken(self._arguments, text))
        self._head += text
        match = _HEAD.match(self._head)
        if match is None:
            return ()
        rest, self._head = self._head[match.end() :], ""
        self._arguments, self.num_calls = JsonText(), 1
        return CallStart(0, match[1]), *_told(_taken(self._arguments, rest))

    def finish(self) -> Sequence[Delta]:
        """The beginning of an answer that was cut before its arguments; what makes JSON of arguments that were cut."""
        if self._arguments is not None:
            return _told(_rest(self._arguments))
        held, self._head = self._head, ""
        return (TextDelta(held),) if held else ()


def _taken(arguments: JsonText, text: str) -> str:
    return "".join(map(arguments.take, text))


def _rest(arguments: JsonText) -> str:
    return arguments.completion() if arguments.depth or arguments.is_over else "{}"


def _told(text: str) -> Sequence[Delta]:
    return (CallArguments(0, text),) if text else ()
