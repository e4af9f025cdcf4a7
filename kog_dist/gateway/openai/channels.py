"""Answers that are messages in channels ("harmony", the format of gpt-oss), as text, reasoning and calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

`analysis` is reasoning. `final`, and `commentary` to nobody, is what the user reads. `commentary` to a function is a call of it.
The recipient may also stand before the channel. Tags are tokens of their own, with text in answers (`Tokenizer.text_bytes`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from kog_dist.gateway.openai.parsers import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, overlap

FINAL_HEADER: Final = "<|channel|>final<|message|>"
_MESSAGE: Final = "<|message|>"
_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_END: Final = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=functions\.([A-Za-z0-9_-]+)")
_OTHER_RECIPIENT: Final = re.compile(r"\bto=")
_BEGINNINGS: Final = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "to=")
_MAX_HEADER: Final = 1024  # characters


def call_header(name: str) -> str:
    """What a call's arguments come behind."""
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"


class Channels:
    """Reads one choice's text. What has no header is content, so that a model that does without is understood as well."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_header = True  # else within a message, or between two
        self._is_first = True
        self._is_between = False
        self._kind: type[TextDelta | ReasoningDelta] | None = TextDelta  # None: a call
        self._has_arguments = True
        self.num_calls = 0

    def push(self, text: str) -> Sequence[Delta]:
        """What is certain with this piece."""
        self._held += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def finish(self) -> Sequence[Delta]:
        """What was held back. A header that was cut off is nothing, unless it is none."""
        deltas: list[Delta] = []
        is_plain = self._is_first and "<|" not in self._held
        if is_plain or not (self._is_header or self._is_between):
            self._tell(deltas, self._held)
        self._held = ""
        self._end_message(deltas)
        return deltas

    def _step(self, deltas: list[Delta]) -> bool:
        """Read a header, a message up to its end, or what is between two; whether there may be more to read."""
        if self._is_header:
            return self._read_header(deltas)
        end = _END.search(self._held)
        certain = end.start() if end else len(self._held) - max(overlap(self._held, tag) for tag in _ENDS)
        if not self._is_between:
            self._tell(deltas, self._held[:certain])
        self._held = self._held[certain:]
        if end is None:
            return False
        tag = end[0]
        self._end_message(deltas)
        self._is_between = tag not in ("<|start|>", "<|channel|>")
        self._is_header = not self._is_between
        self._held = self._held if tag == "<|channel|>" else self._held[len(tag) :]
        return True

    def _read_header(self, deltas: list[Delta]) -> bool:
        head, found, rest = self._held.partition(_MESSAGE)
        begun, length = head.lstrip(), len(head) - (0 if found else overlap(head, _MESSAGE))
        is_begun = any(begun.startswith(tag) or (not found and tag.startswith(begun)) for tag in _BEGINNINGS)
        may_be = not self._is_first or not begun or is_begun
        if not may_be or length > _MAX_HEADER:
            head, rest = "", self._held.removeprefix("<|channel|>")  # no header: content
        elif not found:
            return False
        self._held, self._is_header, self._is_first = rest, False, False
        channel, called = _CHANNEL.search(head), _RECIPIENT.search(head)
        if called is not None and called[1] in self._names:
            deltas.append(CallStart(self.num_calls, called[1]))
            self.num_calls += 1
            self._kind, self._has_arguments = None, False
        elif (channel is not None and channel[1] == "analysis") or _OTHER_RECIPIENT.search(head):
            self._kind = ReasoningDelta  # also what is for tools that nobody has offered
        else:
            self._kind = TextDelta
        return True

    def _tell(self, deltas: list[Delta], text: str) -> None:
        if not text:
            return
        if self._kind is None:
            self._has_arguments = True
            deltas.append(CallArguments(self.num_calls - 1, text))
        else:
            deltas.append(self._kind(text))

    def _end_message(self, deltas: list[Delta]) -> None:
        if self._kind is None and not self._has_arguments:
            deltas.append(CallArguments(self.num_calls - 1, "{}"))
        self._kind, self._has_arguments = TextDelta, True
