"""What may come next, looked up in a request's own tokens: where the last ones stood before, and what followed there.

Pure functions of the tokens: every rank knows all of them, and finds the same. A step takes microseconds: the ends of all runs of
three tokens are kept by a number that is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kog_dist.late_numpy import np

LEAST: Final = 3  # tokens that must be alike, but near to where an earlier draft was
MOST: Final = 32  # tokens that are compared
_LOOKED_AT: Final = 16  # places with the same last tokens, the newest ones
_BEHIND, _AHEAD = 4, 24  # tokens around the place of an earlier draft
_LOST: Final = 8  # tokens in a row that did not follow it, until it is forgotten
_FACTOR, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_GAP: Final = -1  # between the prediction and the prompt
_NOWHERE: Final = -1


class Match(NamedTuple):
    """`start`: where the tokens that may come next begin; `length`: how many in front of them are the last ones, up to MOST."""

    start: int
    length: int


class Lookup:
    """The tokens of one request: `prediction` (what the client expects the answer to be), prompt, and answer so far."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int] = ()) -> None:
        self._tokens = [*prediction, _GAP, *prompt]
        self._num_predicted = len(prediction)
        self._newest: dict[int, int] | None = None  # of each run of LEAST tokens, by its number: where the newest one ends
        self._older: list[int] = []  # by where such a run ends: the end of the one before
        self._expected = 0 if prediction else _NOWHERE  # where the next token stands if an earlier draft goes on
        self._num_missed = 0  # tokens since one was as expected
        self._has_begun = False  # the answer

    def push(self, token_id: int) -> None:
        """The next token of the answer."""
        self._has_begun = True
        tokens, end = self._tokens, len(self._tokens) - 1
        if self._newest is not None and end >= LEAST - 1:  # what it ends has something behind it now
            number = self._number(end)
            self._older.append(self._newest.get(number, _NOWHERE))
            self._newest[number] = end
        if self._expected != _NOWHERE:
            if tokens[self._expected] == token_id:
                self._expected, self._num_missed = self._expected + 1, 0
            else:
                self._num_missed += 1
            if self._num_missed > _LOST or self._expected > end:
                self._expected = _NOWHERE
        tokens.append(token_id)

    def find(self) -> Match | None:
        """The longest match; of equally long ones where an earlier draft goes on, then in the prediction, then the newest one.

        Near to an earlier draft fewer than LEAST tokens are enough; none, right behind a token that was other than expected.
        Before the first token only a prediction is looked at: what a long prompt takes is not to be waited for there.
        """
        if not self._has_begun:
            return self._near()
        best = max((self._match(end) for end in self._ends()), key=self._rank, default=None)
        if best is not None and best.length >= LEAST:
            return best
        return self._near()

    def find_behind(self, forced: Sequence[int]) -> Match | None:
        """The longest match that goes on with `forced`, which is what must come; in its length these count, too."""
        if not self._has_begun:
            return None
        if self._newest is None:
            self._index()
        num = len(forced)
        self._tokens += forced
        found = [match for end in self._ends() if (match := self._match(end)).length >= max(num, LEAST) and match.start >= num]
        del self._tokens[-num:]
        best = max(found, key=self._rank, default=None)
        return None if best is None else Match(best.start - num, best.length)

    def take(self, match: Match, num: int) -> list[int]:
        """The first `num` tokens from there, which are drafted: see `following`."""
        self._expected, self._num_missed = match.start, 0
        return self.following(match, num)

    def following(self, match: Match, num: int) -> list[int]:
        """The first `num` tokens from there, fewer at the end of the prediction; a run that ends with the answer is repeated."""
        found = self._tokens[match.start : match.start + num]
        if match.start < self._num_predicted < match.start + num:
            return found[: self._num_predicted - match.start]
        while len(found) < num:
            found += found[: num - len(found)]
        return found

    def is_predicted(self, match: Match) -> bool:
        """Whether it is in the prediction."""
        return match.start < self._num_predicted

    def _rank(self, match: Match) -> tuple[int, bool, bool, int]:
        return match.length, match.start == self._expected, self.is_predicted(match), match.start

    def _ends(self) -> list[int]:
        """Where runs end that are the last LEAST tokens, and where an earlier draft goes on."""
        if self._newest is None:
            self._index()
        assert self._newest is not None
        last = len(self._tokens) - 1
        found: list[int] = []
        end = self._newest.get(self._number(last), _NOWHERE) if last >= LEAST - 1 else _NOWHERE
        while end != _NOWHERE and len(found) < _LOOKED_AT:
            found.append(end)
            end = self._older[end - LEAST + 1]
        if self._expected > 0:
            found.append(self._expected - 1)
        return [end for end in found if self._is_followed(end)]

    def _is_followed(self, end: int) -> bool:
        """Whether something stands behind it that may come next."""
        return end + 1 < len(self._tokens) and self._tokens[end + 1] != _GAP

    def _match(self, end: int) -> Match:
        tokens, last, length = self._tokens, len(self._tokens) - 1, 0
        while length < MOST and end >= length and tokens[end - length] == tokens[last - length] != _GAP:
            length += 1
        return Match(end + 1, length)

    def _near(self) -> Match | None:
        expected = self._expected
        if expected == _NOWHERE:
            return None
        tokens, first = self._tokens, max(0, expected - _BEHIND)
        last, around = tokens[-1], tokens[first : min(expected + _AHEAD, len(tokens) - 1)]
        alike = [end for end, token in enumerate(around, start=first) if token == last]
        found = [self._match(end) for end in alike if self._is_followed(end)]
        best = max(found, key=lambda match: (match.length, -abs(match.start - expected)), default=None)
        if best is not None:
            return best
        is_begin = not expected and not self._num_missed  # of the prediction
        blind = expected + (self._num_missed > 0)  # as if one token were another
        return Match(blind, 0) if (is_begin or self._num_missed == 1) and self._is_followed(blind - 1) else None

    def _number(self, end: int) -> int:
        first, second, third = self._tokens[end - LEAST + 1 : end + 1]
        return ((first * _FACTOR + second) * _FACTOR + third) & _MASK

    def _index(self) -> None:
        """All runs that something stands behind, at once."""
        tokens = np.array(self._tokens[:-1], np.int64).astype(np.uint64)
        if len(tokens) < LEAST:
            self._newest = {}
            return
        factor = np.uint64(_FACTOR)
        numbers = (tokens[:-2] * factor + tokens[1:-1]) * factor + tokens[2:]
        order = np.argsort(numbers, kind="stable")
        older = np.full(len(numbers), _NOWHERE)
        is_same = numbers[order[1:]] == numbers[order[:-1]]
        older[order[1:][is_same]] = order[:-1][is_same] + LEAST - 1
        self._older = older.tolist()
        self._newest = dict(zip(numbers.tolist(), range(LEAST - 1, len(tokens)), strict=True))
