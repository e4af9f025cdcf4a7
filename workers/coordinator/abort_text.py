"""What a client is told when the engine is being aborted."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.rpc.messages import ErrorCode
from kog_dist.runtime.abi import WaitRecord
from kog_dist.runtime.control import COORDINATOR, NO_RANK, AbortCause

_AGAIN = "repeat the request when the engine runs again"


def describe_abort(cause: AbortCause, rank: int, requests: Sequence[tuple[int, WaitRecord | None]]) -> tuple[ErrorCode, str, int]:
    """Error code, sentence and the coordinator's exit code for an abort word and the ranks that had asked for it."""
    who = "a rank" if rank == NO_RANK else "the coordinator" if rank == COORDINATOR else f"rank {rank}"
    record = next((record for asking, record in requests if record is not None and rank in (asking, NO_RANK)), None)
    seen = f" ({record})" if record is not None else ""
    match cause:
        case AbortCause.SHUTDOWN:
            return ErrorCode.SHUTDOWN, "the engine was stopped before the answer was complete", 0
        case AbortCause.STARTUP_FAILED:
            return ErrorCode.STARTUP_FAILED, f"the engine could not start because of {who}{seen}; see the launcher's output", 3
        case AbortCause.INSTANCE_LOST:
            return ErrorCode.ENGINE_LOST, f"the engine's instance folder was removed or changed, so it was stopped; {_AGAIN}", 4
        case AbortCause.RANK_DIED:
            return ErrorCode.RANK_FAILED, f"{who} died while decoding{seen}; {_AGAIN}", 4
        case AbortCause.RANK_STALLED:
            return ErrorCode.RANK_FAILED, f"{who} gave no sign of life{seen}; {_AGAIN}", 4
        case AbortCause.REQUESTED_BY_RANK:
            return ErrorCode.RANK_FAILED, f"{who} could not go on{seen}; {_AGAIN}", 4
        case _:
            return ErrorCode.INTERNAL_ERROR, f"the engine was aborted ({cause.name.lower()}, {who}); {_AGAIN}", 4
