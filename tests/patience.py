"""Promised seconds on a machine that does other things, too: `make test` may run beside other work."""

from __future__ import annotations

import time

_SPIN_S = 0.03  # several turns of the kernel's scheduler


def slowness() -> float:
    """Seconds that pass here while this thread works for one: 1 where a core is free, 4 beside six busy loops on two cores."""
    begin_s, end_s = time.perf_counter(), time.thread_time() + _SPIN_S
    while time.thread_time() < end_s:
        pass
    return max(1.0, (time.perf_counter() - begin_s) / _SPIN_S)


def in_time(took_s: float, limit_s: float) -> bool:
    """Whether something took less than promised, or than that takes on this machine now."""
    return took_s < limit_s or took_s < limit_s * slowness()
