"""`--check-experts` on GPUs: hosts compare between launches which experts the thread blocks of all ranks have chosen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kog_dist.decode.choices import difference
from kog_dist.errors import PlanError
from kog_dist.workers.engines.launches import DecodeKernel

_CHOICES, _FINDING = b"=", b"!"  # what a rank gives: its choices, or a sentence about its own thread blocks


class ChoiceCheck:
    """One rank's side. `gather` gives what all ranks give, in their order; all methods are collective."""

    def __init__(self, rank: int, per_token: int, gather: Callable[[bytes], list[bytes]]) -> None:
        """`per_token`: experts of a choice."""
        self._rank, self._per_token, self._gather = rank, per_token, gather
        self._position = 0  # of the next token to compare

    def begin(self, position: int) -> None:
        """A request begins, with a token at `position`."""
        self._position = position

    def compare(self, kernel: DecodeKernel) -> None:
        """Compare what has been decoded since the last time; all launches have ended. PlanError, the same on every rank."""
        kernel.finish()  # before anybody waits for a rank whose kernel has not ended well
        first, self._position = self._position, int(kernel.state()["position"])
        if self._position == first:
            return
        choices = kernel.choices(first, self._position)
        finding = self._first_difference(choices, first, blocks_of=self._rank)
        own = _FINDING + finding.encode() if finding else _CHOICES + choices[:, :, 0].astype("<u8").tobytes()
        given = self._gather(own)
        for raw in given:
            if raw.startswith(_FINDING):
                raise PlanError(raw.removeprefix(_FINDING).decode())
        of_ranks = [np.frombuffer(raw, "<u8", offset=len(_CHOICES)).reshape(choices.shape[:2]) for raw in given]
        finding = self._first_difference(np.stack(of_ranks, axis=2), first)
        if finding:
            raise PlanError(finding)

    def _first_difference(self, choices: NDArray[np.uint64], first: int, blocks_of: int | None = None) -> str:
        """See `difference`: of the first token, from position `first`, and layer of (tokens, layers, ranks or thread blocks)."""
        differs = (choices != choices[:, :, :1]).any(axis=2)
        if not differs.any():
            return ""
        index, layer = np.argwhere(differs)[0]
        numbers = [self._numbers(int(word)) for word in choices[index, layer]]
        return difference(numbers, int(layer), first + int(index), blocks_of=blocks_of)

    def _numbers(self, word: int) -> tuple[int, ...]:
        return tuple(word >> 8 * place & 0xFF for place in range(self._per_token))
