"""What a coordinator, and a router in front of several, counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has become of requests and clients since the start; as in StatusReport."""

    num_completed: int = 0
    num_cancelled: int = 0
    num_expired: int = 0
    num_failed: int = 0
    num_refused: int = 0
    num_dropped_clients: int = 0
    num_tokens: int = 0
