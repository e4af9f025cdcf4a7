"""What a coordinator, and a router in front of several, counts."""

from __future__ import annotations

from kog_dist.records import dataclass
from kog_dist.rpc.messages import ErrorCode, FinishReason


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

    def finished(self, reason: FinishReason) -> None:
        """A request has ended with `done`."""
        match reason:
            case FinishReason.CANCELLED:
                self.num_cancelled += 1
            case FinishReason.DEADLINE:
                self.num_expired += 1
            case _:
                self.num_completed += 1

    def failed(self, code: ErrorCode) -> None:
        """An accepted request has ended with `error`."""
        if code is ErrorCode.DEADLINE_EXCEEDED:
            self.num_expired += 1
        else:
            self.num_failed += 1

    def refused(self, code: ErrorCode) -> None:
        """A request has ended with `error` before it was accepted."""
        if code is ErrorCode.DEADLINE_EXCEEDED:
            self.num_expired += 1
        else:
            self.num_refused += 1
