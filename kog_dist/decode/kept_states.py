"""Where a state that every token changes can go back to: copies of it that ranks make while they read a prompt.

Ranks and the coordinator's books follow the same rule. A KV cache has two copies: behind the last whole STEP of a prompt, and
behind its end but for the last token, which is decoded. A request that goes back to one of them loses those behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP = 512  # tokens: so many at most are read anew in front of the newest that two prompts share
NUM_COPIES = 2
_AT_STEP, _AT_END = range(NUM_COPIES)


def copies_of(num_cached: int, num_prompt: int) -> dict[int, int]:
    """Of a prompt of which so many tokens are cached: positions behind which copies are made, in order, by the copy's number."""
    end = num_prompt - 1
    at_step = end // STEP * STEP
    return ({_AT_STEP: at_step} if num_cached < at_step < end else {}) | {_AT_END: end}


def still_there(copies: Mapping[int, int], num_positions: int) -> dict[int, int]:
    """The copies that count behind a return to so many positions."""
    return {number: position for number, position in copies.items() if position <= num_positions}
