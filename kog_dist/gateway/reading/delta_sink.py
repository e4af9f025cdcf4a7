"""Collects what readers find, as deltas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kog_dist.gateway.reading.deltas import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, ThoughtBefore, joined
from kog_dist.gateway.reading.json_text import BLANKS
from kog_dist.gateway.reading.tags import Symbol, Tag

_TAIL: Final = 64  # characters


class DeltaSink:
    """Collects what readers find. Blanks at the beginning, around thoughts and around calls belong to nothing."""

    def __init__(
        self, functions: Mapping[str, Mapping[str, object]], *, has_one_call: bool = False, parts_thoughts: bool = True
    ) -> None:
        """`has_one_call`: the first call is all that is wanted. `parts_thoughts`: else they are content."""
        self.functions, self._parts_thoughts = functions, parts_thoughts
        self.num_calls = 0
        self.is_enough = False
        self.is_fresh = True  # nothing but blanks since the beginning, a thought or a call
        self.num_tokens = 0  # of the answer so far
        self._num_reasoning = 0  # of thoughts that have ended
        self._thought_begin: int | None = None  # of the thought that goes on: tokens before it
        self.has_text = False
        self.tail = ""  # the end of what is content, or of blanks before it
        self.has_thought = False
        self.direct: Callable[[str], None] | None = None  # takes text of any length, while the reader would do nothing else
        self._has_one_call = has_one_call
        self._deltas: list[Delta] = []
        self._blanks = ""

    def take(self) -> Sequence[Delta]:
        """What was found since the last call."""
        deltas, self._deltas = self._deltas, []
        return joined(deltas) if len(deltas) > 1 else deltas

    def text(self, text: str) -> None:
        """See Sink."""
        if self.is_enough:
            return
        if self.is_fresh:
            bare = text.lstrip(BLANKS)
            if not bare:
                self._blanks += text
                return
            text = self._blanks + text if not self.has_thought and not self.num_calls else bare
            self._blanks, self.is_fresh = "", False
        if text:
            self.has_text = True
            self.tail = (self.tail + text)[-_TAIL:]
            self._deltas.append(TextDelta(text))

    def reason(self, text: str) -> None:
        """See Sink. The blanks at both ends are left out."""
        if not self._parts_thoughts:
            self.text(text)
            return
        if self.is_enough:
            return
        whole = self._blanks + text
        kept = whole.rstrip(BLANKS)
        self._blanks = whole[len(kept) :]
        if self.is_fresh:
            kept = kept.lstrip(BLANKS)
        if kept:
            self.is_fresh = False
            self._deltas.append(ReasoningDelta(kept))

    def edge(self) -> None:
        """Blanks here are nothing."""
        self.tail = ""
        self._blanks, self.is_fresh = "", True

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of thoughts, with the tags at their ends."""
        return self._num_reasoning + (0 if self._thought_begin is None else self.num_tokens - self._thought_begin)

    def think(self, num_before: int) -> None:
        """A thought begins behind so many tokens."""
        self.edge()
        self.has_thought, self._thought_begin = True, num_before

    def stop_thinking(self, end: Symbol) -> None:
        """The thought ends with this symbol."""
        self.edge()
        if self._thought_begin is not None:
            known = isinstance(end, Tag) and end.num_before is not None
            num_tokens = end.num_before + 1 if known else self.num_tokens  # type: ignore[union-attr, operator]
            self._num_reasoning, self._thought_begin = self._num_reasoning + num_tokens - self._thought_begin, None

    def was_thought(self) -> None:
        """The text so far was a thought."""
        if not self.is_enough:
            self._deltas.append(ThoughtBefore())
            self.has_thought = True
            self.edge()

    def call(self, name: str) -> None:
        """See Sink."""
        if self.is_enough:
            return
        self._deltas.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self.edge()

    def arguments(self, text: str) -> None:
        """See Sink."""
        if text and not self.is_enough:
            self._deltas.append(CallArguments(self.num_calls - 1, text))

    def called(self) -> None:
        """See Sink."""
        self.is_enough = self.is_enough or (self._has_one_call and self.num_calls > 0)

    def end(self) -> None:
        """Blanks are all that there was."""
        if self.is_fresh and self._blanks and not self.num_calls and not self.has_thought and not self.is_enough:
            self._deltas.append(TextDelta(self._blanks))
