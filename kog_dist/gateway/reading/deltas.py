"""What an answer is made of. However it was cut into tokens, the same comes out when put together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeAlias

from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ThoughtBefore:
    """All content so far was a thought: a tag that ends one has come, and none had begun it. A stream cannot take it back."""


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name`; `idx` counts the answer's calls."""

    idx: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of that call's arguments. All of them together are a JSON object, also where the answer was cut."""

    idx: int
    text: str


Delta: TypeAlias = TextDelta | ReasoningDelta | ThoughtBefore | CallStart | CallArguments


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same with neighbours of one kind made one."""
    found: list[Delta] = []
    for (kind, idx), group in groupby(deltas, key=lambda delta: (type(delta), getattr(delta, "idx", -1))):
        if kind is TextDelta or kind is ReasoningDelta:
            found.append(kind("".join(delta.text for delta in group)))  # type: ignore[union-attr]
        elif kind is CallArguments:
            found.append(CallArguments(idx, "".join(delta.text for delta in group)))  # type: ignore[union-attr]
        else:
            found += group
    return found
