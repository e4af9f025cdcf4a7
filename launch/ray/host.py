"""The engine's host process on a node: the supervisor of `kog-launch`, whose ranks are children of Ray actors.

`python -m kog_dist.launch.ray.host JSON`, started by the host actor and killed with it. A process of its own, because it forks
the reaper, handles signals and answers deaths within milliseconds, and the process of a Ray actor has a dozen threads and its own
handlers. What the launcher of a plain engine prints goes to the driver instead, one JSON object per line through `report_fd`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Any, ClassVar

from kog_dist.config import LaunchConfig
from kog_dist.errors import KogError, LaunchError
from kog_dist.launch.engine import EngineProcesses
from kog_dist.launch.events import EventLog, make_log_folder
from kog_dist.launch.hosted_ranks import Door
from kog_dist.launch.outcome import Outcome
from kog_dist.launch.process import EngineProcess
from kog_dist.launch.progress import StartupProgress
from kog_dist.launch.signals import StopSignals
from kog_dist.launch.supervisor import Supervisor
from kog_dist.launch.target import choose_target
from kog_dist.records import dataclass
from kog_dist.rpc.paths import ACCESS_NAME
from kog_dist.runtime.folder_file import read_object
from kog_dist.runtime.instance import instances_root
from kog_dist.runtime.process_arguments import JsonArguments
from kog_dist.runtime.process_page import ProcessPage
from kog_dist.workers.arguments import WorkerArgs


@dataclass(frozen=True, slots=True)
class HostArgs(JsonArguments):
    """Arguments of the process. `settings` are those of the run, with ranks, gpus and instance fixed."""

    reader: ClassVar[str] = "host process"

    settings: dict[str, Any]
    generation: int
    origin: str
    report_fd: int
    page_fd: int = -1  # of the ProcessPage on which the actor says that a signal is meant


class ActorRanks:
    """Ranks that are children of Ray actors; see `RankSource`. The kernel ties this process to its actor: no lifelines."""

    lifelines: Mapping[int, str] = {}
    is_killed_soon = False

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.door = Door("Ray actor")

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """See `RankSource`."""
        return self.door.start(arguments, log_dir)


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


class ReportedProgress(StartupProgress):
    """Start-up as the driver shows it."""

    def __init__(self, reports: Reports) -> None:
        super().__init__(under_starter=True)
        self._reports, self._told = reports, ""

    def show(self, text: str, *, doing: str = "", share: float | None = None) -> None:
        """See `StartupProgress`."""
        told = text if share is None else f"{text} ({10 * int(10 * share)} % done)"
        if told != self._told:
            self._told = told
            self._reports.report("doing", text=told)

    def clear(self) -> None:
        """See `StartupProgress`. The driver clears its own."""


class HostSupervisor(Supervisor):
    """Tells the driver what the plain one tells the user: how to reach the engine, and with the last report how it ended."""

    def __init__(self, settings: LaunchConfig, engine: EngineProcesses, signals: StopSignals, reports: Reports) -> None:
        super().__init__(settings, engine, signals, reports)
        self._reports = reports
        self._progress = ReportedProgress(reports)

    def _conclude(self, outcome: Outcome) -> None:
        pass

    def _announce(self) -> None:
        folder = instances_root() / self._engine.instance
        access = folder / ACCESS_NAME
        keys = read_object(access)
        self._reports.report("ready", folder=str(folder), access=keys, engine=self._engine.kind)


def main() -> int:
    """Run the engine to its end, which is the last report."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the thread of the actor that starts this process blocks SIGINT
    args = HostArgs.from_json(sys.argv[1])
    settings = LaunchConfig(**args.settings)
    page = ProcessPage.from_fd(args.page_fd)
    meant = None if page is None else page.obey  # a signal that nobody asked the driver for ends this process: a loss
    with os.fdopen(args.report_fd, "w", encoding="utf-8") as stream, StopSignals(meant) as signals:
        try:
            outcome = _run(args, settings, signals, Reports(stream))
        except KogError as error:
            outcome = Outcome(error.exit_code, "cannot_start", str(error))
        stream.write(json.dumps({"kind": "ended", "outcome": asdict(outcome)}) + "\n")
    return outcome.exit_code


def _run(args: HostArgs, settings: LaunchConfig, signals: StopSignals, reports: Reports) -> Outcome:
    ranks = ActorRanks(args.origin)
    engine = EngineProcesses(settings, choose_target(settings), None, _log_folder(settings), ranks)
    outcome: Outcome | None = None
    try:
        reports.report("open", door=ranks.door.address)
        outcome = HostSupervisor(settings, engine, signals, reports).run()
    finally:
        engine.stop(outcome)
        ranks.door.close()
    return outcome


def _log_folder(settings: LaunchConfig) -> Path | None:
    if settings.log_dir is None:
        return None
    try:
        make_log_folder(Path(settings.log_dir))
    except OSError as error:
        raise LaunchError(f"log folder {settings.log_dir} cannot be made on the engine's node: {error.strerror}") from None
    return Path(settings.log_dir)


if __name__ == "__main__":
    sys.exit(main())
