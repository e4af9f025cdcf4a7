"""Learning rate over the steps of a run, as a share of its full value."""

from __future__ import annotations

import math

SCHEDULES = ("wsd", "cosine")


def learning_rate_factor(step_idx: int, num_steps: int | None, *, schedule: str, warmup_steps: int, decay_share: float) -> float:
    """Share of the full learning rate at step `step_idx` of `num_steps` (None: not known yet, so no decay).

    Linear warm-up, then `wsd` (warm-up, stable, decay): flat, with a linear fall to zero over the last `decay_share` of all
    steps; `cosine`: half a cosine from the end of the warm-up to zero.
    """
    warmup = min(1.0, (step_idx + 1) / max(1, warmup_steps))
    if num_steps is None:
        return warmup
    if schedule == "cosine":
        done = max(0, step_idx - warmup_steps) / max(1, num_steps - warmup_steps)
        return warmup * (1 + math.cos(math.pi * done)) / 2
    return min(warmup, (num_steps - step_idx) / max(1, int(num_steps * decay_share)))
