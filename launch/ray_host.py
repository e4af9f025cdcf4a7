"""The engine's host process on a node: the supervisor of `kog-launch`, whose ranks are children of Ray actors.

`python -m kog_dist.launch.ray_host JSON`, started by the host actor and killed with it. A process of its own, because it forks
the reaper, handles signals and answers deaths within milliseconds, and the process of a Ray actor has a dozen threads and its own
handlers. What the launcher of a plain engine prints goes to the driver instead, one JSON object per line through `report_fd`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from kog_dist.config import LaunchConfig
from kog_dist.errors import KogError, LaunchError
from kog_dist.instance import instances_root
from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.events import EventLog
from kog_dist.launch.outcome import Outcome
from kog_dist.launch.ray_ranks import ActorRanks
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.supervisor import Supervisor
from kog_dist.launch.target import choose_target
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.wait import Deadline

ACTOR_S = 30.0  # for the rank actors to report: they are up already, and are told at once


@dataclass(frozen=True, slots=True)
class HostArgs:
    """Arguments of the process. `settings` are those of the run, with ranks, gpus and instance fixed."""

    settings: dict[str, Any]
    generation: int
    origin: str
    report_fd: int

    def to_json(self) -> str:
        """One line for the command line."""
        return json.dumps(asdict(self))


class Reports(EventLog):
    """Lines for the user and everything else that the driver must know, as JSON lines: `kind`, and what belongs to it."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(None)  # the driver keeps the log of the run
        self._stream = stream

    def report(self, kind: str, **what: Any) -> None:
        """Tell the driver; one that is gone does not matter any more, this process is killed with its actor."""
        self._stream.write(json.dumps({"kind": kind, **what}) + "\n")
        self._stream.flush()

    def say(self, text: str, *, error: bool = False) -> None:
        """See `EventLog`."""
        self.report("said", text=text, error=error)


class HostSupervisor(Supervisor):
    """Tells the driver how to reach the engine, where the plain one tells the user."""

    def _announce(self) -> None:
        folder = instances_root() / self._engine.instance
        access = folder / ACCESS_NAME
        keys = json.loads(access.read_text(encoding="utf-8")) if access.exists() else None
        assert isinstance(self._events, Reports)
        self._events.report("ready", folder=str(folder), access=keys)


def main() -> int:
    """Run the engine to its end, which is the last report."""
    args = HostArgs(**json.loads(sys.argv[1]))
    settings = LaunchConfig(**args.settings)
    with os.fdopen(args.report_fd, "w", encoding="utf-8") as stream, StopSignals() as signals:
        try:
            outcome = _run(args, settings, signals, Reports(stream))
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
        stream.write(json.dumps({"kind": "ended", "outcome": asdict(outcome)}) + "\n")
    return outcome.exit_code


def _run(args: HostArgs, settings: LaunchConfig, signals: StopSignals, reports: Reports) -> Outcome:
    ranks = ActorRanks(args.origin, Deadline.after(ACTOR_S), lambda: signals.count > 0)
    engine = EngineProcesses(settings, choose_target(settings), None, _log_folder(settings), ranks)
    outcome: Outcome | None = None
    try:
        reports.report("open", door=str(ranks.open(instances_root() / engine.instance)), pid=os.getpid())
        outcome = HostSupervisor(settings, engine, signals, reports).run()
    finally:
        engine.stop(outcome)
        ranks.close()
    return outcome


def _log_folder(settings: LaunchConfig) -> Path | None:
    if settings.log_dir is None:
        return None
    try:
        Path(settings.log_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"log folder {settings.log_dir} cannot be made on the engine's node: {error.strerror}") from None
    return Path(settings.log_dir)


if __name__ == "__main__":
    sys.exit(main())
