"""Whether tokens are drafted, and several verified in a pass: as a request asks, or an engine was told for those that do not."""

from __future__ import annotations

import enum


class Speculation(enum.StrEnum):
    """Answers are the same with each. Drafts switch themselves off where they do not pay."""

    OFF = "off"
    LOOKUP = "lookup"  # from prompt, answer and prediction
    AUTO = "auto"  # from earlier answers, too; GPUs that have no drafts for a model do without
