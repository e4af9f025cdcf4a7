"""What the token ring carries of a choice besides the token; `sampling/logprobs.py` defines the values."""

from __future__ import annotations

from typing import NamedTuple


class TokenLogprobs(NamedTuple):
    """Of one token: its own log-probability, and the ids and log-probabilities of the most likely tokens, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
