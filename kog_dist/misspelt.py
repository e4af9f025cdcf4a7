"""Whether a name that nobody knows is a known one, written wrongly."""

from __future__ import annotations

import re
from typing import Final

_NO_LETTER: Final = re.compile("[^a-z0-9]")
_LONG: Final = 8  # letters of a name that may be misspelt twice
_LEAST: Final = 4  # of one that may be at all


def is_misspelt(name: str, known: str) -> bool:
    """Whether `name` is `known` but for case, signs between words, and one letter, or two of a long name."""
    one, other = (_NO_LETTER.sub("", word.lower()) for word in (name, known))
    longest = max(len(one), len(other))
    most = 0 if longest < _LEAST else 1 if longest < _LONG else 2
    return abs(len(one) - len(other)) <= most and _distance(one, other) <= most


def _distance(one: str, other: str) -> int:
    """Letters to be put in, left out, replaced, or swapped with the next one."""
    before, row = list[int](), list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                cost = min(cost, last[j - 2] + 1)
            row.append(cost)
    return row[-1]
