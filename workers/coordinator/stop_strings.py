"""Stop strings over a stream of text pieces: what may become one is held back, what is one never leaves.

Special tokens have no text, but a stop string may name them. In here each of them that some stop string names is one character,
a lone surrogate, which no decoded text contains; it is taken out of what leaves.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of the stop strings has occurred.

    The cut is where the first complete occurrence begins: first by its end, then by its beginning. So the result does not depend
    on how the text was cut into pieces.
    """

    _FIRST_MARK = 0xDC00

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._marks: dict[str, str] = {}  # of special tokens, by their names; empty for those that no stop string has
        self._unmarked: dict[int, None] = {}
        self._names = {stop: stop for stop in self._stops}  # what each was given as
        self.stopped_by: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self.stopped_by is not None

    @property
    def has_stops(self) -> bool:
        """Whether there is any stop string."""
        return bool(self._stops)

    def push(self, piece: str, special: str = "") -> str:
        """The text that is certain with this piece; once `stopped`, nothing more. `special`: the name of a special token that
        comes behind it.
        """
        if not self._stops:
            return piece
        text = self._push(piece + self._mark_of(special) if special else piece)
        return text.translate(self._unmarked) if self._unmarked else text

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held.translate(self._unmarked) if self._unmarked else held

    def _mark_of(self, special: str) -> str:
        if special not in self._marks:
            named = [stop for stop in self._stops if special in stop]
            mark = chr(self._FIRST_MARK + len(self._unmarked)) if named else ""
            marked = {stop.replace(special, mark): self._names[stop] for stop in named}
            self._stops += tuple(marked)
            self._names = marked | self._names
            self._marks[special] = mark
            self._unmarked |= dict.fromkeys(map(ord, mark))
        return self._marks[special]

    def _push(self, piece: str) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, stop = min(found)
            self.stopped_by, self._held = self._names[stop], ""
            return text[:start]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
