"""How many tokens to draft: from what passes of several tokens cost, and from how many drafts were right so far.

All of it is counted, nothing measured while a request runs: every rank decides alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens of a pass that is compiled; drafts are cut to them
MOST: Final = SIZES[-1]
_LENGTHS: Final = (0, 1, 2, 3, 5, 8, 16)  # of matches, from which on they count as one kind
_HOPES: Final = (0.35, 0.5, 0.65, 0.6, 0.75, 0.87, 0.93)  # of each kind: how probably a token is right, before any was counted
_TRUST, _MEMORY = 2.0, 0.95  # tokens that a hope counts for; what an earlier count is worth with each draft
_WORTH: Final = 1.02  # tokens in the time of one, from which on a draft is made
_CREDIT, _SHARE = 0.5, 0.003  # passes that drafts may lose in all, and of each token of the answer besides
_SAVED: Final = 8.0  # passes won before that may be lost again


def costs_between(measured: Mapping[int, float]) -> list[float]:
    """What a pass of each of SIZES costs, in passes of one token, from some that were measured, one token's among them.

    Between them, and beyond the last ones, it grows evenly; a pass costs no less than a smaller one.
    """
    sizes = sorted(measured)
    costs = [1.0]
    for size in SIZES[1:]:
        above = min(bisect_left(sizes, size), len(sizes) - 1)
        if above:
            low, high = sizes[above - 1], sizes[above]
            slope = (measured[high] - measured[low]) / (high - low)
            seconds = measured[high] + slope * (size - high)
        else:
            seconds = measured[1] * size  # nothing is known: as if a pass read the weights for each token
        costs.append(max(costs[-1], seconds / measured[1]))
    return costs


def shared_out(outlooks: Sequence[Sequence[float]], num_tokens: int) -> list[int]:
    """How many drafts each of several requests has in a pass with room for `num_tokens` of all.

    `outlooks`: of each, how probably its drafts are right, up to the first, the first two and so on. Those that are more likely
    go first; of equally likely ones those of whom has fewer yet, then of who comes first.
    """
    nums = [0] * len(outlooks)
    for _ in range(num_tokens):
        left = [idx for idx, outlook in enumerate(outlooks) if nums[idx] < len(outlook)]
        if not left:
            break
        nums[max(left, key=lambda idx: (outlooks[idx][nums[idx]], -nums[idx], -idx))] += 1
    return nums


class DraftLengths:
    """Of one request. `costs`: of a pass of each of SIZES, in passes of one token."""

    def __init__(self, costs: Sequence[float]) -> None:
        self._costs = costs
        self._right = [hope * _TRUST for hope in _HOPES]
        self._wrong = [(1 - hope) * _TRUST for hope in _HOPES]
        self._balance = _CREDIT  # passes that may be lost

    def may_draft(self) -> bool:
        """Whether the smallest draft may be lost."""
        return self._costs[1] - 1 <= self._balance

    def hope(self, length: int) -> float:
        """How probably a token behind a match of so many is right."""
        kind = bisect_right(_LENGTHS, length) - 1
        return self._right[kind] / (self._right[kind] + self._wrong[kind])

    def best(self, length: int, most: int, num_forced: int = 0) -> int:
        """Tokens to draft behind a match of so many tokens, `most` at most; 0: none. The first `num_forced` are right."""
        hope = self.hope(length)
        best, best_rate, expected, chance, drafted = 0, _WORTH, 1.0, 1.0, 0
        for size, cost in zip(SIZES[1:], self._costs[1:], strict=True):
            if size > most + 1 or cost - self._forced_cost(min(num_forced, size - 1)) > max(self._balance, 0.0):
                break
            while drafted < size - 1:
                chance *= hope if drafted >= num_forced else 1.0
                expected, drafted = expected + chance, drafted + 1
            if expected / cost > best_rate:
                best, best_rate = drafted, expected / cost
        return best

    def took(self, length: int, num_drafted: int, num_right: int, num_forced: int = 0) -> None:
        """A pass had so many drafts behind a match of so many tokens, of which the first `num_right` were right.

        Those that were forced, fewer than all, say nothing about the others.
        """
        kind = bisect_right(_LENGTHS, length) - 1
        won = num_right - num_forced
        self._right[kind] = self._right[kind] * _MEMORY + max(won, 0)
        self._wrong[kind] = self._wrong[kind] * _MEMORY + (num_right < num_drafted)
        cost = self._costs[SIZES.index(num_drafted + 1)]
        self._balance = min(self._balance + won - (cost - self._forced_cost(num_forced)), _SAVED)

    def _forced_cost(self, num_forced: int) -> float:
        """Of a pass with these drafts alone."""
        return self._costs[bisect_left(SIZES, num_forced + 1)]

    def passed(self, num_tokens: int) -> None:
        """The answer has so many tokens more."""
        self._balance = min(self._balance + _SHARE * num_tokens, _SAVED)
