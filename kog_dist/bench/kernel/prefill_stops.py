"""`kog-bench prefill --stops`: how long a stop within a prompt waits for what is queued."""

from __future__ import annotations

import time
from collections.abc import Callable

from kog_dist.bench.report import percentile


def stops(
    run: Callable[[Callable[[], bool]], int], count: int, now: Callable[[], float] = time.perf_counter
) -> dict[str, object]:
    """`run` is `Prefill.run` of one prompt, which is asked to stop at `count` times that are spread evenly over it.

    Milliseconds from when a stop was wanted until `run` returned, 0 where the prompt had ended before; and the positions that the
    cache held then.
    """
    run(lambda: False)
    begin_s = now()
    run(lambda: False)
    whole_s = now() - begin_s
    waits_ms, reached = [], []
    for number in range(count):
        wanted_s = now() + whole_s * (number + 0.5) / count
        reached.append(run(lambda wanted_s=wanted_s: now() >= wanted_s))  # type: ignore[misc]
        waits_ms.append(1e3 * max(0.0, now() - wanted_s))
    figure = {
        "whole_ms": round(1e3 * whole_s, 1),
        "stops": count,
        "median_ms": round(percentile(waits_ms, 0.5), 1),
        "most_ms": round(max(waits_ms), 1),
        "reached": reached,
    }
    print(
        f"  {count} stops within {figure['whole_ms']} ms: {figure['median_ms']} ms median, {figure['most_ms']} ms at most; "
        f"positions kept: {', '.join(map(str, sorted(set(reached))))}",
        flush=True,
    )
    return figure
