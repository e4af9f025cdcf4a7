"""How many replicas there should be, from how many requests wait. Pure: the caller brings the time."""

from __future__ import annotations

from typing import Final

UP_AFTER_S: Final = 1.0  # with requests waiting all the time until one replica more is started


class Scaler:
    """Between `low` and `high` replicas, one at a time, and slower down than up."""

    def __init__(self, low: int, high: int, down_after_s: float, now_s: float) -> None:
        self._low, self._high = low, high
        self._down_after_s = down_after_s
        self._waiting_since_s: float | None = None
        self._all_needed_s = now_s  # when all replicas were last needed

    def decide(self, now_s: float, *, num_replicas: int, num_waiting: int, num_running: int, is_settled: bool) -> int:
        """1, 0 or -1: how many replicas to add. `is_settled`: none is starting or stopping."""
        if num_waiting == 0:
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = now_s
        if num_waiting + num_running >= num_replicas or not is_settled:
            self._all_needed_s = now_s
        if not is_settled:
            return 0
        if num_replicas < self._low:
            return 1
        if self._waiting_since_s is not None and now_s - self._waiting_since_s >= UP_AFTER_S and num_replicas < self._high:
            self._waiting_since_s = None
            return 1
        if now_s - self._all_needed_s >= self._down_after_s and num_replicas > self._low:
            self._all_needed_s = now_s
            return -1
        return 0
