"""Means over seeds with their confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from kog_dist.records import dataclass

# 97.5th percentile of Student's t distribution by degrees of freedom, from 1 on
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


@dataclass(frozen=True)
class Mean:
    """A mean of `count` values; `half` is half the width of its 95 % confidence interval, None with fewer than two values."""

    value: float
    half: float | None
    count: int

    def text(self, digits: str) -> str:
        """For tables: the value in this format, with its interval."""
        value = format(self.value, digits)
        return value if self.half is None else f"{value} ± {self.half:.4f}"


def mean_of(values: Sequence[float]) -> Mean:
    """Mean and interval of independent, roughly normal values (one per seed). Needs one value at least."""
    if not values:
        raise ValueError("there is no mean of no values")
    if len(values) == 1:
        return Mean(values[0], None, 1)
    freedom = len(values) - 1
    t = _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.5 / freedom  # to 0.01
    half = t * statistics.stdev(values) / math.sqrt(len(values))
    return Mean(statistics.fmean(values), half, len(values))


def paired(values: dict[int, float], others: dict[int, float]) -> Mean | None:
    """Mean of `values` minus `others` over the seeds that both have: what seeds do to both alike drops out."""
    seeds = sorted(values.keys() & others.keys())
    return mean_of([values[seed] - others[seed] for seed in seeds]) if seeds else None
