"""Stop strings over a stream of text pieces: what may become one is held back, what is one never leaves."""

from __future__ import annotations

from collections.abc import Sequence


class StopFilter:
    """Passes text on until one of the stop strings has occurred.

    The cut is where the first complete occurrence begins: first by its end, then by its beginning. So the result does not depend
    on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain with this piece; once `stopped`, nothing more."""
        if not self._stops:
            return piece
        if self.stopped:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
