"""One engine on one node of a Ray cluster, as its driver sees it: from asking for resources to giving them back.

gang = RayGang(cluster, settings, target, launcher, instance="default")
while not gang.is_ready and gang.outcome is None:
    for report in gang.poll(0.2): ...
...
gang.begin_stop(drain=True); gang.wait_ended(Deadline.after(15)); gang.close()

A driver may have several. Nothing blocks longer than the caller says. Ray carries control and reports, never tokens: clients talk
to the engine at `access`.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.launch.outcome import EXIT_CANNOT_START, EXIT_RANK_DIED, Outcome, how_it_ended, signal_name
from kog_dist.launch.ray.actors import EngineHost, RankActor
from kog_dist.launch.ray.cluster import RayCluster, run_bounded, shortfall
from kog_dist.launch.ray.host import HostArgs
from kog_dist.launch.target import Target, plan_target
from kog_dist.records import dataclass
from kog_dist.rpc.ray_engines import actor_name
from kog_dist.rpc.transport import Access
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.wait import Deadline

RELEASE_S = 2.0
REPORT_S = 3.0  # for the host process to say what happened to a rank whose actor is gone
_PLACE_POLL_S = 0.2
_SHORTFALL_AFTER_S = 1.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class EngineMessage:
    """Something that the engine tells its user."""

    text: str
    is_error: bool = False


def choose_ray_target(settings: LaunchConfig) -> Target:
    """The model and its ranks, planned where no GPU needs to be. Raises ConfigError, CheckpointError."""
    if settings.gpus is not None and not settings.gpus.strip().isdecimal():
        raise ConfigError(f"--gpus {settings.gpus}: Ray chooses the GPUs, so give their number")
    return plan_target(settings)[0]


class RayGang:
    """Host actor and rank actors of one engine in a placement group on one node."""

    def __init__(
        self,
        cluster: RayCluster,
        settings: LaunchConfig,
        target: Target,
        launcher: LauncherFile,
        *,
        instance: str,
        generation: int = 1,
        over_tcp: bool = False,
    ) -> None:
        """Ask for the resources and return. `over_tcp`: listen on the node's address, as on nodes other than the driver's."""
        from ray.util.placement_group import placement_group

        self.instance, self.generation = instance, generation
        self.node = ""  # address, once there is one
        self.access: Access | None = None  # how to reach the engine, once it is ready
        self.kind = ""  # see `EngineProcesses.kind`; from then on
        self.folder: Path | None = None  # its instance folder there
        self.outcome: Outcome | None = None  # how it ended
        self.doing = "asking for resources"  # what start-up waits for
        self._cluster, self._settings, self._target, self._launcher, self._over_tcp = (
            cluster,
            settings,
            target,
            launcher,
            over_tcp,
        )
        self._kind = "GPU" if target.device == "cuda" else "CPU"
        self._deadline = Deadline.after(settings.startup_timeout)
        self._patience = Deadline.after(_SHORTFALL_AFTER_S)
        self._lost: tuple[Outcome, Deadline] | None = None
        self._num_reports = 0
        self._actors: list[object] = []
        self._host: Any = None
        self._next_reports: object = None
        self._runs: dict[object, int] = {}
        self._group = placement_group([{self._kind: 1}] * target.world_size, strategy="STRICT_PACK")

    @property
    def is_ready(self) -> bool:
        """Whether it can be used."""
        return self.access is not None and self.outcome is None

    def poll(self, timeout_s: float) -> list[EngineMessage]:
        """Wait at most so long for news, and take them in. Lines for the user come back; the rest is in the attributes."""
        if self.outcome is not None:
            return []
        return self._place(timeout_s) if self._host is None else self._listen(timeout_s)

    def wait_ended(self, deadline: Deadline) -> Outcome | None:
        """The outcome, None if it has not ended by the deadline. Lines for the user are dropped."""
        while self.outcome is None and not deadline.expired():
            self.poll(min(1.0, deadline.remaining_s()))
        return self.outcome

    def begin_stop(self, *, drain: bool, signum: int = signal.SIGTERM) -> None:
        """Let the engine finish the running request and stop, or stop at once; `poll` until there is an outcome.

        `signum` is what a plain engine's launcher would have got; it shows in what the engine says.
        """
        if self._host is None:
            self._end(Outcome(0, "drained"))
            return
        self._host.signal.remote(int(signum))
        if not drain:  # the second signal says: at once; the same one might be merged with the first
            self._host.signal.remote(int(signal.SIGINT if signum != signal.SIGINT else signal.SIGTERM))

    def close(self) -> None:
        """Give the resources back. What still runs is killed."""
        if not self._cluster.is_lost():
            run_bounded(self._release, RELEASE_S)
        if self.outcome is None:
            self._end(Outcome(EXIT_RANK_DIED, "killed", "the engine did not stop in time and was killed"))

    def _release(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)  # asks the node, which may have died a moment ago

    # ---- start ----
    def _place(self, timeout_s: float) -> list[EngineMessage]:
        if self._group.wait(min(max(timeout_s, 0.01), _PLACE_POLL_S)):
            self._start_actors()
            return []
        nodes, size = self._cluster.nodes(self._kind), self._target.world_size
        if self._patience.expired():  # a new cluster knows its resources only after a moment
            self.doing = shortfall(nodes, self._kind, size) or "waiting for Ray to place the engine"
        never = self._cluster.is_private and all(node.total < size for node in nodes)
        if never or self._deadline.expired():
            limit = "" if never else f" after {self._settings.startup_timeout:g} s"
            reason = shortfall(nodes, self._kind, size) or "Ray has not placed it"
            self._end(Outcome(EXIT_CANNOT_START, "no_resources", f"no place for the engine{limit}: {reason}"))
        return []

    def _start_actors(self) -> None:
        import ray
        from ray.util import placement_group_table
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        node_id = next(iter(placement_group_table(self._group)["bundles_to_node_id"].values()))
        self.node = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)
        is_elsewhere = node_id != ray.get_runtime_context().get_node_id()
        arguments = HostArgs(
            asdict(self._node_settings(is_elsewhere or self._over_tcp)), self.generation, f"Ray {self._cluster.version}", -1
        ).to_json()

        def place(rank: int) -> Any:
            return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

        size, uses_gpu = self._target.world_size, self._kind == "GPU"
        name = actor_name(self._launcher.instance, self.instance, self.generation)
        host = ray.remote(EngineHost).options(name=name, num_cpus=0, scheduling_strategy=place(0))
        self._host = host.remote(size, self._launcher, ray.get_runtime_context().get_node_id())
        self._actors.append(self._host)
        amount = {"num_cpus": 0, "num_gpus": 1} if uses_gpu else {"num_cpus": 1}
        for rank in range(size):
            actor = ray.remote(RankActor).options(**amount, scheduling_strategy=place(rank)).remote()
            self._actors.append(actor)
            run = actor.run.remote(rank, size, self._host, arguments, uses_gpu, self._settings.startup_timeout)
            self._runs[run] = rank
        self._next_reports = self._host.reports.remote(0)
        self.doing = f"starting {size} rank actor{'s' if size > 1 else ''} on {self.node}"

    def _node_settings(self, over_tcp: bool) -> LaunchConfig:
        """The run's settings as the host process takes them: one plain engine, of which nothing is left to choose."""
        settings, target = self._settings, self._target
        if over_tcp:
            host = self.node if settings.rpc_host == _LOOPBACK else settings.rpc_host
            settings = replace(settings, rpc_port=settings.rpc_port or 0, rpc_host=host)
        return replace(
            settings, launcher="local", ray_address=None, replicas=1, min_replicas=None, max_replicas=None, remote_replicas=None,
            model=None if settings.model is None else str(target.folder), device=target.device, instance=self.instance,
            ranks=target.world_size if target.device == "cpu" else 0,
            gpus=None if target.device == "cpu" else str(target.world_size),
            log_dir=None if settings.log_dir is None else str(Path(settings.log_dir).absolute()),
            http=False, api_key=None, api_key_file=None,  # HTTP is the driver's
        )  # fmt: skip

    # ---- life ----
    def _listen(self, timeout_s: float) -> list[EngineMessage]:
        import ray

        limit_s = timeout_s if self._lost is None else min(timeout_s, self._lost[1].remaining_s())
        done, _ = ray.wait([self._next_reports, *self._runs], num_returns=1, timeout=limit_s)
        lines: list[EngineMessage] = []
        for ref in done:
            if ref == self._next_reports:
                lines += self._take_reports(ref)
            else:
                self._take_run(ref)
        if self.outcome is None and self._lost is not None and self._lost[1].expired():
            self._end(self._lost[0])
        if self.outcome is None and self.access is None and self._deadline.expired():
            sentence = f"the engine was not ready after {self._settings.startup_timeout:g} s: {self.doing}"
            self._end(Outcome(EXIT_CANNOT_START, "startup_timeout", sentence))
        return lines

    def _take_reports(self, ref: Any) -> list[EngineMessage]:
        import ray

        try:
            found = [json.loads(text) for text in ray.get(ref)]
        except ray.exceptions.RayError as error:
            self._lose(
                Outcome(EXIT_RANK_DIED, "host_lost", f"the engine's host actor on {self.node} is gone: {_cause(error)}"), 0.0
            )
            return []
        self._num_reports += len(found)
        self._next_reports = self._host.reports.remote(self._num_reports)
        return [line for report in found for line in self._take_report(report)]

    def _take_report(self, report: dict[str, Any]) -> list[EngineMessage]:
        match report["kind"]:
            case "said":
                return [EngineMessage(report["text"], report["error"])]
            case "doing":
                self.doing = report["text"]
            case "ready":
                self.folder, self.kind = Path(report["folder"]), report["engine"]
                keys = report["access"]
                self.access = Access(**keys) if keys is not None else Access(f"ipc://{self.folder / 'rpc.sock'}")
            case "ended":
                self._end(Outcome(**report["outcome"]))
            case "gone" if self.outcome is None:
                code = report["exit_code"]
                ended = how_it_ended(code) if code is not None else "is gone"
                last = f": {report['last_line']}" if report["last_line"] else ""
                sentence = f"the engine's host process (pid {report['pid']}) {ended}{last}"
                name = None if code is None else signal_name(code)
                self._end(Outcome(EXIT_RANK_DIED, "host_died", sentence, pid=report["pid"], signal=name))
        return []

    def _take_run(self, ref: object) -> None:
        """A rank's actor has finished, which is in order once the engine has ended; else the host process will say more."""
        import ray

        rank = self._runs.pop(ref)
        try:
            ray.get(ref)
        except ray.exceptions.RayError as error:
            exit_code = EXIT_CANNOT_START if self.access is None else EXIT_RANK_DIED
            sentence = f"the actor of rank {rank} failed: {_cause(error)}"
            self._lose(Outcome(exit_code, "actor_lost", sentence, rank), REPORT_S if self.access is not None else 0.0)

    def _lose(self, outcome: Outcome, grace_s: float) -> None:
        if self._lost is None or self._lost[1].remaining_s() > grace_s:
            self._lost = (outcome, Deadline.after(grace_s))

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is None:
            self.outcome = outcome


def _cause(error: Exception) -> str:
    """What Ray says in one line; for an error of our own code, that."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    return " ".join(text.splitlines()[0].split()).rstrip(".") if text else type(error).__name__
