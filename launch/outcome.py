"""How an engine ended: exit code, one sentence, and `exit.json` for whoever loses exit codes on the way."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict
from pathlib import Path

from kog_dist.launch.events import say_lost
from kog_dist.records import dataclass
from kog_dist.system.files import EXIT_FILE, write_at_once

INTERRUPTED = "stopped_by_"  # how the reason of an interrupted run begins
_REQUEST = "request_"  # how the reason of an end begins about which the client has told the user
EXIT_OK, EXIT_USAGE, EXIT_CANNOT_START, EXIT_RANK_DIED, EXIT_TIMEOUT = 0, 2, 3, 4, 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run. `reason` is stable and machine-readable; `sentence` is for people, None when all went well."""

    exit_code: int
    reason: str
    sentence: str | None = None
    rank: int | None = None
    pid: int | None = None
    signal: str | None = None

    @property
    def user_knows(self) -> bool:
        """Whether the client of the one request has said it already."""
        return self.reason.startswith(_REQUEST)

    def write(self, log_dir: Path | None, instance: str | None) -> None:
        """Leave `exit.json` in the log folder, if there is one. A full disk is not allowed to hide the real outcome."""
        if log_dir is None:
            return
        record = asdict(self) | {"instance": instance, "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        try:
            write_at_once(log_dir / EXIT_FILE, json.dumps(record, indent=2).encode() + b"\n", is_private=True)
        except OSError as error:
            say_lost(log_dir, error)


def client_outcome(pid: int, code: int) -> Outcome:
    """The end of a run for one request, from the exit code of its client."""
    if code == 0:
        return Outcome(code, "answered")
    if code < 0:
        sentence = f"the client (pid {pid}) {how_it_ended(code)} before the answer was complete"
        return Outcome(128 - code, "client_killed", sentence, pid=pid, signal=signal_name(code))
    ends = {EXIT_USAGE: ("refused", "was refused"), 128 + signal.SIGINT: ("cancelled", "was cancelled")}
    reason, what = ends.get(code, ("failed", "failed"))
    return Outcome(code, _REQUEST + reason, f"the request {what}; the client has said why on stderr")


def how_it_ended(exit_code: int) -> str:
    """`was killed by SIGKILL` or `stopped with exit code 70`, from a child's exit code."""
    if exit_code < 0:
        return f"was killed by {signal_name(exit_code)}"
    return f"stopped with exit code {exit_code}"


def signal_name(exit_code: int) -> str | None:
    """Name of the signal that ended a child with this exit code, None if it was none."""
    if exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
