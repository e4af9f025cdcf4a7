"""What drafts would give a request whose tokens come from passes without any, told from the tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kog_dist.decode.lookup import Lookup

_SHARE: Final = 1 / 16  # of what is known, that a pass counts for
_LEAST_PASSES: Final = 12  # before anything is known
_KEPT: Final = 0.93  # of the time of turns, whose launches have edges


class DraftGain:
    """Follows a request's answer in passes of up to `num_tokens` tokens that it might have had with drafts.

    `extra`: what a pass of several tokens takes more than one of a single token, in such passes. A token takes some 70 us.
    """

    def __init__(
        self, prompt: Sequence[int], prediction: Sequence[int], answer: Sequence[int], num_tokens: int, extra: float
    ) -> None:
        self._lookup, self._num_tokens, self._extra = Lookup(prompt, prediction), num_tokens, extra
        self._num_known = 0
        self._draft, self._num_taken, self._num_passes = list[int](), 0, 0
        self.catch_up(answer)
        self._tokens, self._time = 0.0, 0.0  # of the newest passes, the older the less

    @property
    def rate(self) -> float:
        """Tokens in the time of a pass of one token; 1 as long as nothing is known."""
        return self._tokens / self._time if self._num_passes >= _LEAST_PASSES else 1.0

    def catch_up(self, answer: Sequence[int]) -> None:
        """The answer so far, whose tokens behind those that it knows count for nothing."""
        for token_id in answer[self._num_known :]:
            self._lookup.push(token_id)
        self._num_known, self._draft, self._num_taken = len(answer), [], 0

    def took(self, token_id: int) -> None:
        """The next token of the answer."""
        self._lookup.push(token_id)
        self._num_known += 1
        is_right = self._draft[self._num_taken : self._num_taken + 1] == [token_id]
        self._num_taken += 1
        if is_right:
            return
        took = 1 + self._extra if self._draft else 1.0
        self._tokens += self._num_taken * _SHARE - self._tokens * _SHARE
        self._time += took * _SHARE - self._time * _SHARE
        self._num_passes, self._num_taken = self._num_passes + 1, 0
        match = self._lookup.find()
        self._draft = [] if match is None else self._lookup.take(match, self._num_tokens - 1)


def gains_from_turns(gains: Sequence[DraftGain], extra: float) -> bool:
    """Whether requests are sooner done if each has passes of its own in turn, with drafts, than if they share passes without.

    A pass with a token of each takes as long as one with drafts, or less.
    """
    num = len(gains)
    shared = 1 / (1 + extra * min((num - 1) / 3, 1))
    return min(gain.rate for gain in gains) / num * _KEPT > shared
