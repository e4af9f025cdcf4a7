"""When the next token of an answer is likely, for those on whose speed the token after it depends: they do not sleep then.

A mask is made between two tokens (docs/sampling.md), which a GPU decodes in as little as 280 us. To be woken, or to end
a sleep, takes a good part of that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

LONGEST_GAP_S = 0.002  # between tokens; for slower ones sleeping is soon enough
_BEFORE_S, _AFTER_S = 60e-6, 300e-6  # around the moment at which a token is likely
_SHRINKS, _GROWS = 0.8, 1.02  # the gap, with a token that comes early (two are seen at once, after a delay) or late


class Pace:
    """The gap between tokens, as far as it is known. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s, self._gap_s = -math.inf, math.inf

    def token(self) -> None:
        """A token is there."""
        now_s, known_s = self._clock(), self._gap_s
        gap_s, self._last_s = now_s - self._last_s, now_s
        self._gap_s = gap_s if known_s > LONGEST_GAP_S else min(max(gap_s, _SHRINKS * known_s), _GROWS * known_s)

    def until_near_s(self) -> float:
        """Seconds until the next token is likely, 0 or less from then on; infinity if that is not known, or it is overdue."""
        if self._gap_s > LONGEST_GAP_S:
            return math.inf
        left_s = self._last_s + self._gap_s - _BEFORE_S - self._clock()
        return left_s if left_s > -(_BEFORE_S + _AFTER_S) else math.inf
