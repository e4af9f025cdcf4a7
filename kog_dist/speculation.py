"""Whether tokens are drafted, and several verified in a pass: as a request asks, or an engine was told for those that do not."""

from __future__ import annotations

import enum


class Speculation(enum.StrEnum):
    """Answers are the same with each. Drafts switch themselves off where they do not pay."""

    OFF = "off"
    LOOKUP = "lookup"  # from prompt, answer and prediction
    AUTO = "auto"  # the best source there is


# With which an engine on GPUs has drafts. AUTO is not one of them until the test of their bits has passed there: docs/passes.md.
ON_GPUS = frozenset({Speculation.LOOKUP})


def has_drafts(device: str, asked: str) -> bool:
    """Whether ranks on a device ("cpu" or "cuda") can draft, where an engine was told `asked`."""
    return device == "cpu" or asked in ON_GPUS
