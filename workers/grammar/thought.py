"""Masks of an answer that begins with a thought."""

from __future__ import annotations

from typing import Protocol

from kog_dist.late_numpy import np
from kog_dist.runtime.masks import MaskWords


class Mask(Protocol):
    """Where an answer is in its grammar; see compiler.Matcher."""

    def mask(self) -> MaskWords:
        """What may come next."""

    def forced(self) -> list[int]:
        """Tokens that must come next, one after the other, as far as it is known."""

    def accept(self, token_id: int) -> None:
        """Go on with a token."""

    @property
    def error(self) -> str:
        """Why nothing may come; empty if it is not so."""


class Thought:
    """An answer that begins with a thought: free until `end_id`, which is forced behind `most` tokens; then `answer` counts."""

    def __init__(self, texts: MaskWords, end_id: int, most: int | None, answer: Mask | None) -> None:
        """`texts`: the mask of tokens that have a text. Without an `answer` everything may follow."""
        self._end_id, self._most, self._answer = end_id, most, answer
        self._num_tokens = 0
        self._is_over = False
        self._end = np.zeros_like(texts)
        self._end[end_id // 32] = np.uint32(1 << end_id % 32)
        self._free = texts | self._end
        self._all = np.full_like(texts, 0xFFFFFFFF)

    def mask(self) -> MaskWords:
        """See Mask."""
        if self._is_over:
            return self._all if self._answer is None else self._answer.mask()
        return self._end if self._is_full else self._free

    def forced(self) -> list[int]:
        """See Mask."""
        if not self._is_over and not self._is_full:
            return []
        behind = [] if self._answer is None else self._answer.forced()
        return behind if self._is_over else [self._end_id, *behind]

    @property
    def _is_full(self) -> bool:
        return self._most is not None and self._num_tokens >= self._most

    def accept(self, token_id: int) -> None:
        """See Mask."""
        if self._is_over:
            if self._answer is not None:
                self._answer.accept(token_id)
            return
        self._num_tokens += 1
        self._is_over = token_id == self._end_id

    @property
    def error(self) -> str:
        """See Mask."""
        return "" if self._answer is None else self._answer.error
