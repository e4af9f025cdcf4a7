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

    def draft(self, most: int) -> Draft:
        """What may come next, `most` tokens at most."""

    def took(self, token_ids: Sequence[int]) -> None:
        """The answer goes on with these: what was right of the last draft, and one token more."""


class LookupDrafter:
    """Drafts from prompt, answer and prediction, as long as they pay. `costs` as of DraftLengths."""

    def __init__(self, prompt: Sequence[int], prediction: Sequence[int], costs: Sequence[float]) -> None:
        self._lookup, self._lengths = Lookup(prompt, prediction), DraftLengths(costs)
        self._last: tuple[Match, int] | None = None

    def draft(self, most: int) -> Draft:
        """See `Drafter.draft`."""
        self._last = None
        match = self._lookup.find() if most > 0 and self._lengths.may_draft() else None
        num = 0 if match is None else self._lengths.best(match.length, most)
        if match is None or not num:
            return NO_DRAFT
        found = self._lookup.take(match, num)
        fitting = max(size for size in SIZES if size <= len(found) + 1) - 1
        self._last = (match, fitting)
        return Draft(found[:fitting], self._lookup.is_predicted(match))

    def took(self, token_ids: Sequence[int]) -> None:
        """See `Drafter.took`."""
        if self._last is not None and self._last[1]:
            match, num_drafted = self._last
            self._lengths.took(match.length, num_drafted, len(token_ids) - 1)
        self._lengths.passed(len(token_ids))
        for token_id in token_ids:
            self._lookup.push(token_id)
