"""Drafts of a request's next tokens, which a pass then verifies (`Interpreter.verify`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kog_dist.decode.draft_lengths import SIZES, DraftLengths
from kog_dist.decode.lookup import Lookup, Match


class Draft(NamedTuple):
    """Tokens that may come next. `is_predicted`: they are from the request's prediction."""

    token_ids: Sequence[int] = ()
    is_predicted: bool = False


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Of one request. Every rank has its own, and all make the same drafts."""

    def outlook(self, most: int, forced: Sequence[int] = ()) -> Sequence[float]:
        """How probably the first token of what `draft` would give is right, the first two, and so on. What is drafted then may
        have fewer.
        """

    def draft(self, most: int, forced: Sequence[int] = ()) -> Draft:
        """What may come next, `most` tokens at most. `forced`: what must, as the request's grammar says."""

    def took(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these: what was right of the last draft, and one token more."""


class _Last(NamedTuple):
    """What was drafted: `num_forced` tokens, and behind them those of a match."""

    match: Match
    num_drafted: int
    num_forced: int


class LookupDrafter:
    """Drafts from prompt, answer and prediction, as long as they pay, and what a grammar forces. `costs` as of DraftLengths."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int], costs: Sequence[float]) -> None:
        self._lookup, self._lengths = Lookup(prompt, prediction), DraftLengths(costs)
        self._last: _Last | None = None
        self._plan: tuple[Match | None, int] | None = None  # of the next draft, once somebody has asked for its outlook
        self._forced: list[int] = []  # in the last draft
        self._trusts_forced = True

    def outlook(self, most: int, forced: Sequence[int] = ()) -> Sequence[float]:
        """See `Drafter.outlook`."""
        self._plan = match, num = self._planned(most, forced)
        hope, num_forced = 1.0 if match is None else self._lengths.hope(match.length), min(num, len(self._forced))
        return [1.0] * num_forced + [hope ** (1 + idx) for idx in range(num - num_forced)]

    def draft(self, most: int, forced: Sequence[int] = ()) -> Draft:
        """See `Drafter.draft`."""
        match, num = self._plan or self._planned(most, forced)
        self._last = self._plan = None
        num = min(num, max(most, 0))
        if match is not None and num > len(self._forced):
            return self._of_match(match, num)
        self._forced = self._forced[:num]
        return Draft(self._forced) if self._forced else NO_DRAFT

    def _planned(self, most: int, forced: Sequence[int]) -> tuple[Match | None, int]:
        """Tokens to draft, and the match that goes on beyond those which are forced, if that pays."""
        self._forced = [*forced[: max(most, 0)]] if self._trusts_forced else []
        match = self._match() if most > 0 and (self._forced or self._lengths.may_draft()) else None
        num_forced = len(self._forced)
        if match is not None:
            num = self._lengths.best(match.length, most, num_forced)
            if num > num_forced:
                return match, num
        return None, self._lengths.best(0, num_forced, num_forced)

    def _match(self) -> Match | None:
        """What goes on with all that is forced."""
        if not self._forced:
            return self._lookup.find()
        behind = self._lookup.find_behind(self._forced)
        match = behind or self._lookup.find()
        return match if match is not None and self._lookup.following(match, len(self._forced)) == self._forced else None

    def _of_match(self, match: Match, num: int) -> Draft:
        found, num_forced = self._lookup.take(match, num), len(self._forced)
        fitting = max(size for size in SIZES if size <= len(found) + 1) - 1
        if fitting > num_forced:
            self._last = _Last(match, fitting, num_forced)
        self._forced = self._forced[:fitting]
        return Draft(found[:fitting], self._lookup.is_predicted(match))

    def took(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.took`."""
        num_right = len(token_ids) - 1
        if num_right < len(self._forced):
            self._trusts_forced = False  # nobody knows why; it costs time, and nothing else
        elif self._last is not None:
            self._lengths.took(self._last.match.length, self._last.num_drafted, num_right, self._last.num_forced)
        self._lengths.passed(len(token_ids))
        for token_id in token_ids:
            self._lookup.push(token_id)
