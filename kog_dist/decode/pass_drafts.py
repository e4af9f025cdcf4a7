"""Drafts on GPUs: which tokens a pass has, and how many tokens passes have. The kernel looks up and decides by itself, as here.

Two builds take turns: passes of one token, and passes of `num_tokens`. Everything is counted in whole numbers, so that all thread
blocks decide alike: time in parts of that of a pass of one token, of which it has UNIT. `workers/phases/drafts.cuh` is the same
for the device; it compares no more than PLACES places with the same two last tokens, about the newest ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kog_dist.decode.lookup import Lookup

UNIT: Final = 1024
CREDIT: Final = UNIT  # of time that drafts may lose in all,
SHARE: Final = 5  # and for each token of the answer besides: half a percent
MOST_SAVED: Final = 8 * UNIT  # of what drafts have won, that may be lost again
PATIENCE: Final = 2  # passes of several tokens without a draft, until passes have one token again
PLACES: Final = 32
LEAST_PROMPT: Final = 2  # tokens of a prompt, besides what prefill takes, from which on they go several at a time


def in_units(passes: float) -> int:
    """Time, given in passes of one token."""
    return round(passes * UNIT)


class PassDrafts:
    """Of one request, from the pass on that has the prompt's last token.

    `num_left`: tokens of the prompt that passes still read. `extra`: what a pass of `num_tokens` costs more than one of a single
    token; `edge`: what it costs to begin with these, and to end with them; `wait`: what a right draft costs whose mask a grammar
    makes only then, at most UNIT. In parts of UNIT.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        prediction: Sequence[int],
        max_tokens: int,
        num_tokens: int,
        *,
        num_left: int,
        extra: int,
        edge: int,
        wait: int = 0,
    ) -> None:
        self._lookup = Lookup(prompt, prediction)
        self._num_tokens, self._extra, self._edge, self._left = num_tokens, extra, edge, max_tokens
        self._won = UNIT - wait  # with each draft that is right
        self.start = -1  # of the draft, among prediction, a gap, prompt and answer; -1: there is none
        self.num_found = 0  # tokens there,
        self.draft: list[int] = []  # of which the next pass has these
        self.is_predicted = False
        # Of the next pass, whether there is a draft or not.
        self.per_pass = num_tokens if prediction or num_left >= LEAST_PROMPT else 1
        of_prompt = (num_left - 1) % self.per_pass  # tokens of that pass besides the prompt's last one, for which it was needed
        if prediction and self._find():
            self.draft = self.draft[: num_tokens - 1 - of_prompt]
        self.balance = CREDIT + (extra if of_prompt else 0)
        self.num_idle = 0 if self.draft else PATIENCE

    def took(self, token_ids: Sequence[int], forced: Sequence[int] = ()) -> None:
        """The answer goes on with these: what was right of the draft, and one token more. `forced`: from that one on, what a
        grammar forces; it is drafted where it pays, before anything is looked up.
        """
        is_large = self.per_pass > 1
        if is_large:
            num_right = min(len(token_ids) - 1, len(self.draft))
            self.balance += UNIT * num_right - self._extra
        self.balance = min(self.balance + SHARE * len(token_ids), MOST_SAVED)
        self.balance -= (UNIT - self._won) * num_right if is_large else 0
        self._left -= len(token_ids)
        for token_id in token_ids:
            self._lookup.push(token_id)
        edge = 0 if is_large else self._edge
        behind = [*forced[1 : self._num_tokens]] if [*forced[:1]] == [*token_ids[-1:]] else []
        if self.balance >= 0 and self._won * len(behind) > self._extra + edge:
            self.start, self.num_found, self.is_predicted, self.draft = -1, len(behind), False, behind[: max(self._left - 1, 0)]
        elif self.balance < self._extra + edge or not self._find():
            self._idle()
            return
        self.balance -= edge
        self.per_pass, self.num_idle = self._num_tokens, 0

    def _idle(self) -> None:
        """There is no draft."""
        self.start, self.num_found, self.draft = -1, 0, []
        self.num_idle += 1
        if self.num_idle > PATIENCE or self.balance < self._extra:
            self.per_pass = 1

    def _find(self) -> bool:
        match = self._lookup.find()
        if match is None:
            return False
        found = self._lookup.take(match, self._num_tokens - 1)
        self.start, self.num_found, self.is_predicted = match.start, len(found), self._lookup.is_predicted(match)
        self.draft = found[: max(self._left - 1, 0)]
        return True
