"""What one engine consists of on this machine: the leased folder, shared memory and processes. Made here, ended here."""

from __future__ import annotations

import math
import os
import select
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from kog_dist import env
from kog_dist.config import LaunchConfig
from kog_dist.launch import local
from kog_dist.launch.gpu_leases import GpuLeases
from kog_dist.launch.http import EngineOfGateway
from kog_dist.launch.instance_watch import InstanceWatch
from kog_dist.launch.local import LocalRanks
from kog_dist.launch.outcome import INTERRUPTED, Outcome
from kog_dist.launch.process import EngineProcess
from kog_dist.launch.readiness_probe import ReadinessProbe
from kog_dist.launch.reaper import Reaper, acquire_watched
from kog_dist.launch.target import Target
from kog_dist.rpc.paths import ACCESS_NAME, SOCKET_NAME
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.rpc.transport import Access
from kog_dist.runtime.control import COORDINATOR, NO_RANK, AbortCause, ControlPage, RankState
from kog_dist.runtime.instance import sweep_stale
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.socket_file import SocketFile
from kog_dist.runtime.topology import LocalRendezvous, RankInfo
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs
from kog_dist.workers.coordinator.arguments import CoordinatorArgs

GRACE_S = 1.0  # from the abort word to SIGTERM
TERM_GRACE_S = 0.4  # from SIGTERM to SIGKILL
GIVE_UP_S = 15.0  # a process that the kernel cannot end by then is left to it
_POLL_S = 0.05


class RankSource(Protocol):
    """How the ranks of an engine come into being, which is all in which launchers differ. `LocalRanks` is the plain one."""

    origin: str  # what started the ranks, for people: "MPICH 5.0.2"; empty where it is the launcher itself
    lifelines: Mapping[int, str]  # pidfds of processes without which the engine must not go on, and who they are
    is_killed_soon: bool  # after a stop signal whoever started the ranks kills them: too soon to drain, not to tell clients

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """Start the worker of every rank on this machine, yielding each in the order of ranks as soon as it exists.

        Descriptors in the arguments are those of this process. Raises LaunchError; the caller ends what was yielded before.
        """


class EngineProcesses:
    """Everything that `kog-launch` creates. `stop` may be called at any moment, also when `start` was never called or failed."""

    def __init__(
        self,
        settings: LaunchConfig,
        target: Target,
        request: PromptRequest | None,
        log_dir: Path | None,
        ranks: RankSource | None = None,
        socket_file: SocketFile | None = None,
    ) -> None:
        """Take the instance name and make the control page; starts no process but the reaper. Raises LaunchError.

        `socket_file`: what is removed with the engine, whatever happens.
        """
        self.request = request
        self.world_size = target.world_size
        self.model_name, self.device = target.model_name, target.device
        self.children: list[EngineProcess] = []
        self.ranks: RankSource = ranks or LocalRanks()
        self._settings, self._target, self._log_dir = settings, target, log_dir
        name = settings.instance or ("default" if request is None else f"prompt-{os.getpid()}")
        sweep_stale()  # what a killed launcher, reaper and coordinator left under names that nobody asks for again
        self._lease, self._reaper = acquire_watched(name, socket_file)
        self.instance = self._lease.name
        self._watch = InstanceWatch(self._lease)
        self._probe = ReadinessProbe(f"ipc://{self._lease.folder / SOCKET_NAME}")
        self._gpu_leases = GpuLeases()
        try:
            self._gpu_leases = GpuLeases.acquire(target.gpus)
            spec = target.checkpoint.spec
            self.control = ControlPage.create(
                target.world_size, spec.max_context, vocab_size=spec.vocab_size, parallel=target.parallel
            )
            self._rendezvous = LocalRendezvous.create(target.world_size)
        except BaseException:
            self._gpu_leases.close()
            self._lease.remove()
            self._reaper.dismiss()
            raise

    @property
    def endpoint(self) -> str:
        """The address to show: the TCP port if one was asked for, else the socket file."""
        access = self._lease.folder / ACCESS_NAME
        if self._settings.rpc_port is not None and access.exists():
            return Access.from_file(access).address
        return f"ipc://{self._lease.folder / SOCKET_NAME}"

    def introduce(self, launcher: LauncherFile) -> None:
        """Leave word of this process in the folder, for `kog-client stop` and `logs`. Raises LaunchError."""
        launcher.write(self._lease.folder)

    @property
    def seen_by_gateway(self) -> EngineOfGateway:
        """What an HTTP gateway needs to know of this engine."""
        return EngineOfGateway(self._target.folder, self.model_name, self._lease.folder)

    @property
    def target(self) -> Target:
        """What it runs, and where."""
        return self._target

    @property
    def kind(self) -> str:
        """What its ranks run on, for people; of GPUs that are ready also whether prompts go through prefill."""
        if self.device != "cuda":
            return self.device
        return f"cuda, prefill {'on' if self.control.has_prefill() else 'off'}"

    @property
    def note(self) -> str:
        """What the launcher's log should say of it; empty if there is nothing."""
        return self._target.note

    def start(self) -> None:
        """Start coordinator, ranks and, for a prompt, its client. Raises LaunchError if a process cannot be started."""
        self._spawn_coordinator()
        for child in self.ranks.start([self._rank_arguments(rank) for rank in range(self.world_size)], self._log_dir):
            self._adopt(child)
        if self.request is not None:
            self._spawn_client(self.request)

    def is_ready(self) -> bool:
        """Whether every rank can take a request, and the coordinator says that it takes them, or has handed one to the ranks."""
        states = {self.control.state(rank) for rank in range(self.world_size)}
        return states <= {RankState.READY, RankState.RUNNING} and (self.control.doorbell() > 0 or self._probe.is_ready())

    def loss_of_instance(self, *, was_ready: bool) -> str | None:
        """A sentence once no client could find the engine because somebody removed its folder, or files in it."""
        return self._watch.look(self.control.beat_age_s(COORDINATOR) if was_ready else math.inf)

    def rank_pid(self, rank: int) -> int | None:
        """Process id of a rank."""
        return next((child.pid for child in self.children if child.rank == rank), None)

    def mend_reaper(self) -> int | None:
        """Start the reaper again if somebody has killed it: pid of the one that is gone, None if all is well."""
        if not self._reaper.has_ended():
            return None
        gone = self._reaper.pid
        self._reaper = Reaper.start(self._lease)
        for child in self.children:
            if child.exit_code is None:
                self._reaper.watch(child.pid)
        return gone

    def abort(self, cause: AbortCause, rank: int = NO_RANK) -> None:
        """Set the abort word; the first cause stands. Who is stopped, and a client whose engine never came, end at once."""
        self.control.set_abort(cause, rank)
        self._kill_stopped()
        if cause is AbortCause.STARTUP_FAILED:
            self.signal_client(signal.SIGKILL)  # the launcher says what happened

    def _kill_stopped(self) -> None:
        """Processes that are stopped do not hear of an abort, and their clients nothing from them."""
        for child in self.children:
            if child.is_stopped():
                child.send(signal.SIGKILL)

    def signal_client(self, signum: int) -> None:
        """Signal the client of the one request, if there is one."""
        for child in self.children:
            if child.role == "client":
                child.send(signum)

    def stop(self, outcome: Outcome | None, *, keeps_socket_file: bool = False) -> None:
        """End every process, remove the folder, give the name up: within GRACE_S + TERM_GRACE_S and the kernel's time to kill.

        `keeps_socket_file`: whoever comes next listens on it.
        """
        self.control.set_abort(AbortCause.SHUTDOWN)
        grace_s = GRACE_S
        if outcome is None or outcome.reason.startswith(INTERRUPTED):
            grace_s = 0
            self.signal_client(signal.SIGKILL)  # whoever pressed Ctrl-C wants no explanations
        deadlines = (Deadline.after(grace_s), Deadline.after(grace_s + TERM_GRACE_S))
        give_up, sent = Deadline.after(GIVE_UP_S), 0
        while any(child.exit_code is None for child in self.children) and not give_up.expired():
            self._kill_stopped()
            for child in self.children:
                child.read_output()
            while sent < 2 and deadlines[sent].expired():
                for child in self.children:
                    if sent or child.role != "coordinator":  # which has the abort word, and tells clients before it ends
                        child.send((signal.SIGTERM, signal.SIGKILL)[sent])
                sent += 1
            self._wait_for_exits()
        for child in self.children:
            child.read_output()
            child.close()
        self._probe.close()
        self._rendezvous.close()
        self.control.close()
        self._gpu_leases.close()
        if keeps_socket_file:
            self._lease.socket_file = None
        self._lease.remove()
        self._reaper.dismiss()

    def _wait_for_exits(self) -> None:
        running = [child.ended_fd for child in self.children if child.exit_code is None]
        if running:
            select.select(running, [], [], _POLL_S)

    # ---- spawning ----
    def _rank_arguments(self, rank: int) -> WorkerArgs:
        settings = self._settings
        return WorkerArgs(
            info=RankInfo(rank, self.world_size, rank, self.instance, 1, self.control.fd, self._rendezvous.fd),
            model=str(self._target.folder), device=self._target.rank_device(rank), kv_dtype=self._target.kv_dtype,
            verify=settings.verify, startup_timeout_s=settings.startup_timeout, step_timeout_s=settings.step_timeout,
            num_kv_caches=self._target.num_kv_caches, parallel=self._target.parallel, kept_bytes=self._target.kept_bytes,
            kept_host_bytes=self._target.kept_host_bytes, whole_windows=self._target.whole_windows,
            placement=self._target.placement(rank), prefill=self._target.prefill,
            context=self._target.checkpoint.spec.max_context, quantize=settings.quantize,
            quantize_head=settings.quantize_head, rounded_cache_bytes=settings.quantize_cache_bytes,
            check_experts=settings.check_experts, drafts=self.device == "cuda" and self._target.drafts,
        )  # fmt: skip

    def _spawn_coordinator(self) -> None:
        settings = self._settings
        arguments = CoordinatorArgs(
            instance=self.instance, folder=str(self._lease.folder), lease_fd=self._lease.lease_fd, control_fd=self.control.fd,
            model=str(self._target.folder), model_name=self.model_name, supervisor_pid=os.getpid(),
            drain_s=settings.shutdown_timeout, rpc_port=settings.rpc_port, rpc_host=settings.rpc_host,
            rank_places="\n".join(self._target.place(rank) for rank in range(self.world_size) if self.device == "cuda"),
            queue_limit=settings.queue_limit, client_queue_limit=settings.client_queue_limit,
            context=self._target.checkpoint.spec.max_context,
            speculate=settings.speculate if self._target.drafts else "",
        )  # fmt: skip
        child = local.spawn(
            "coordinator",
            "kog_dist.workers.coordinator.process",
            [arguments.to_json()],
            environment=env.child_environment(os.environ),
            pass_fds=(self.control.fd, self._lease.lease_fd),
            log_dir=self._log_dir,
        )
        self._adopt(child)

    def _spawn_client(self, request: PromptRequest) -> None:
        self._adopt(local.spawn_client(request, [f"--instance={self.instance}", "--wait-ready"]))

    def _adopt(self, child: EngineProcess) -> None:
        self.children.append(child)
        self._reaper.watch(child.pid)
