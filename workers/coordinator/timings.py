"""What is measured of a request: the one definition of each figure that `done` and `--json` report.

All moments are nanoseconds on the machine's monotonic clock (CLOCK_MONOTONIC), which coordinator and ranks share. Figures are in
seconds, None where there was no such moment.

| figure | from | to |
|---|---|---|
| `queue_s` | reception of the request by the coordinator | hand-over to the ranks, or the end if that came first |
| `prefill_s` | hand-over to the ranks | first token: prompt tokens that were not cached, and the first choice |
| `ttft_s` | reception | first token |
| `total_s` | reception | end of the request |
| `itl_p50_s` `itl_p99_s` | a token | the next one: median and 99th percentile (nearest rank) of these gaps |
| `tokens_per_s` | first token | last token: tokens after the first, divided by that time |
| `stages_s` | reception | each of `kog_dist.runtime.stages.STAGES`; empty without a token |

`received_s` is the moment of the reception itself, on that clock.

The moment of a token is when rank 0 knew it; tokens that came after a stop string do not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kog_dist.records import dataclass
from kog_dist.runtime.stages import RANK_STAGES, STAGES


@dataclass(frozen=True, slots=True)
class Figures:
    """See the table above."""

    queue_s: float
    total_s: float
    prefill_s: float | None
    ttft_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    tokens_per_s: float | None
    received_s: float
    stages_s: tuple[float | None, ...]


class RequestTimings:
    """The moments of one request: at most one for each token that it may generate."""

    def __init__(self, received_ns: int) -> None:
        self.received_ns = received_ns
        self.submitted_ns: int | None = None
        self._stamps_ns: list[int] = []
        self._stages_ns: dict[str, int] = {}

    def submitted(self, now_ns: int) -> None:
        """The ranks have it from now on."""
        self.submitted_ns = now_ns

    def stage(self, name: str, moment_ns: int) -> None:
        """The request has come to one of STAGES."""
        self._stages_ns[name] = moment_ns

    def first_token(self, taken_ns: int, sent_ns: int, rank_stages_ns: Sequence[int]) -> None:
        """It has been sent. Of what rank 0 stamped, what is older than the request's turn belongs to another one."""
        begin_ns = self.submitted_ns or self.received_ns
        self._stages_ns |= {"taken": taken_ns, "sent": sent_ns}
        self._stages_ns |= {name: ns for name, ns in zip(RANK_STAGES, rank_stages_ns, strict=True) if ns >= begin_ns}

    def add_token(self, stamp_ns: int) -> float:
        """Note a token; returns its moment in seconds after the reception."""
        self._stamps_ns.append(stamp_ns)
        return self.since_reception_s(stamp_ns)

    def since_reception_s(self, moment_ns: int) -> float:
        """Seconds from the reception to a moment, never negative."""
        return max(0, moment_ns - self.received_ns) / 1e9

    def running_s(self, now_ns: int) -> float:
        """Seconds since the ranks have it."""
        return 0.0 if self.submitted_ns is None else max(0, now_ns - self.submitted_ns) / 1e9

    def figures(self, end_ns: int) -> Figures:
        """The figures of a request that ends now."""
        stamps_ns = self._stamps_ns
        first_s = self.since_reception_s(stamps_ns[0]) if stamps_ns else None
        queue_s = self.since_reception_s(self.submitted_ns if self.submitted_ns is not None else end_ns)
        gaps_s = sorted(max(0, late - early) / 1e9 for early, late in itertools.pairwise(stamps_ns))
        span_s = (stamps_ns[-1] - stamps_ns[0]) / 1e9 if stamps_ns else 0.0
        return Figures(
            queue_s=queue_s,
            total_s=self.since_reception_s(end_ns),
            prefill_s=None if first_s is None else max(0.0, first_s - queue_s),
            ttft_s=first_s,
            itl_p50_s=percentile(gaps_s, 0.50),
            itl_p99_s=percentile(gaps_s, 0.99),
            tokens_per_s=len(gaps_s) / span_s if span_s > 0 else None,
            received_s=self.received_ns / 1e9,
            stages_s=self._stages_s() if stamps_ns else (),
        )

    def _stages_s(self) -> tuple[float | None, ...]:
        moments_ns = {"started": self.submitted_ns, "put": self._stamps_ns[0], **self._stages_ns}
        return tuple(None if (ns := moments_ns.get(name)) is None else self.since_reception_s(ns) for name in STAGES)


def percentile(ascending: Sequence[float], fraction: float) -> float | None:
    """Nearest-rank percentile of sorted values; None of nothing."""
    if not ascending:
        return None
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]
