"""Run a function on several ranks, for tests and benchmarks: real processes, one short-lived supervisor, no pickle.

    outcomes = run_ranks(4, "package.module:function", {"steps": 100})

A child process imports the module and forks the ranks from itself, so eight ranks cost one interpreter start. It watches them,
sets the abort word when one dies, raises or asks for it, kills what is left at the deadline, and dies with the caller. Arguments
and results are JSON. The function gets a `RankContext` and makes its communicator from it, so the same body runs on CPU ranks and
on GPUs, of which rank r then uses number r, or with `ranks_per_gpu` number r // ranks_per_gpu."""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kog_dist.collectives.api import Communicator, MailboxSpec
from kog_dist.errors import LaunchError
from kog_dist.records import dataclass
from kog_dist.runtime.control import AbortCause, ControlPage
from kog_dist.runtime.topology import LocalRendezvous, RankInfo, Rendezvous
from kog_dist.runtime.wait import Deadline
from kog_dist.system import python_child
from kog_dist.system.parent_death import die_with_parent

if TYPE_CHECKING:
    from kog_dist.collectives.cuda import CudaCommunicator

_POLL_MS = 5
_GRACE_S = 5.0


@dataclass(frozen=True)
class RankContext:
    """What a body works with."""

    info: RankInfo
    control: ControlPage
    rendezvous: Rendezvous
    arguments: Mapping[str, Any]
    deadline: Deadline
    device: str = "cpu"
    gpu: int = 0  # ordinal of the rank's GPU, if it has one
    shares_gpus: bool = False

    def communicator(self, mailboxes: Sequence[MailboxSpec], **options: Any) -> Communicator:
        """This rank's communicator over the mailboxes; options go to `create` of its class."""
        if self.device == "cuda":
            return self.cuda_communicator(mailboxes, **options)
        from kog_dist.collectives.cpu import CpuCommunicator

        return CpuCommunicator.create(
            mailboxes, rendezvous=self.rendezvous, control=self.control, deadline=self.deadline, **options
        )

    def cuda_communicator(self, mailboxes: Sequence[MailboxSpec], **options: Any) -> CudaCommunicator:
        """The same on this rank's GPU, with what kernels of the caller need."""
        from kog_dist.collectives.cuda import CudaCommunicator

        return CudaCommunicator.create(
            mailboxes,
            rendezvous=self.rendezvous,
            control=self.control,
            deadline=self.deadline,
            device=self.gpu,
            shares_gpus=self.shares_gpus,
            **options,
        )


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """How one rank ended. `status` is its exit status, minus the signal's number when it was killed; `error` is a traceback."""

    rank: int
    status: int
    result: Any = None
    error: str = ""


def run_ranks(
    world_size: int,
    body: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = 60.0,
    search_path: Sequence[Path] = (),
    device: str = "cpu",
    ranks_per_gpu: int = 1,
    environ: Mapping[str, str] | None = None,
) -> list[RankOutcome]:
    """Call `body` ("module:function") with a RankContext on every rank; returns the outcomes in the order of ranks.

    `search_path` is put before PYTHONPATH, `environ` over the environment. Ranks that share a GPU take turns: where they wait for
    one another, that takes 50 times as long. Nothing is left running, whatever happens. LaunchError when the ranks could not be
    started."""
    order = {
        "world_size": world_size,
        "body": body,
        "arguments": dict(arguments or {}),
        "deadline_s": deadline_s,
        "device": device,
        "ranks_per_gpu": ranks_per_gpu,
    }
    paths = [*map(str, search_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"CUDA_MODULE_LOADING": "EAGER", **(environ or {})}  # lazy loading can wait for a kernel that waits for a peer
    command = python_child.command("kog_dist.collectives.ranks", json.dumps(order))
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline_s + 2 * _GRACE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        raise LaunchError(f"cannot run {body} on {world_size} ranks: {errors.decode(errors='replace')[-4000:]}")
    return [RankOutcome(**outcome) for outcome in json.loads(output)]


def _main(order: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The supervisor of one run: fork, watch, report."""
    die_with_parent(os.getppid())
    module, _, name = order["body"].partition(":")
    body: Callable[[RankContext], Any] = getattr(importlib.import_module(module), name)
    world_size, deadline = int(order["world_size"]), Deadline.after(float(order["deadline_s"]))
    page = ControlPage.create(world_size, max_context=256)
    meeting = LocalRendezvous.create(world_size)
    reports = [os.memfd_create(f"report-{rank}") for rank in range(world_size)]
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            info = RankInfo(rank, world_size, rank, "ranks", control_fd=page.fd, rendezvous_fd=meeting.fd)
            _run_rank(info, body, order, deadline, reports[rank])
        pids.append(pid)
    statuses = _watch(pids, page, deadline)
    return [{"rank": rank, "status": statuses[rank], **_read_report(reports[rank])} for rank in range(world_size)]


def _run_rank(
    info: RankInfo, body: Callable[[RankContext], Any], order: Mapping[str, Any], deadline: Deadline, report: int
) -> NoReturn:
    """Everything a rank does, in the forked child."""
    status = 1
    try:
        die_with_parent(os.getppid())
        os.dup2(2, 1)  # what libraries print must not mix with the supervisor's report
        control = ControlPage.from_fd(os.dup(info.control_fd))
        meeting = LocalRendezvous.from_fd(os.dup(info.rendezvous_fd), info.rank, aborted=control.aborted)
        per_gpu = int(order["ranks_per_gpu"])
        gpu, shares_gpus = info.rank // per_gpu, per_gpu > 1
        context = RankContext(info, control, meeting, order["arguments"], deadline, order["device"], gpu, shares_gpus)
        outcome = {"result": body(context)}
        status = 0
    except BaseException:
        outcome = {"error": traceback.format_exc()}
    try:
        os.write(report, json.dumps(outcome).encode())
    except BaseException:
        os.write(report, json.dumps({"error": traceback.format_exc()}).encode())
        status = 1
    os._exit(status)


def _watch(pids: Sequence[int], page: ControlPage, deadline: Deadline) -> list[int]:
    """Exit statuses, in the order of ranks. Aborts all when one fails; kills those that do not heed it in time."""
    poller = select.poll()
    ranks = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
    for descriptor in ranks:
        poller.register(descriptor, select.POLLIN)
    statuses: dict[int, int] = {}
    patience = deadline
    while len(statuses) < len(pids):
        for descriptor, _ in poller.poll(_POLL_MS):
            rank = ranks[descriptor]
            poller.unregister(descriptor)
            os.close(descriptor)
            statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pids[rank], 0)[1])
            if statuses[rank] != 0:
                page.set_abort(AbortCause.RANK_DIED, rank)
        for rank, _ in page.abort_requests():
            page.set_abort(AbortCause.REQUESTED_BY_RANK, rank)
        if page.aborted() and patience is deadline:
            patience = Deadline.after(_GRACE_S)
        if patience.expired() or deadline.expired():
            for rank in set(range(len(pids))) - statuses.keys():
                os.kill(pids[rank], signal.SIGKILL)
    return [statuses[rank] for rank in range(len(pids))]


def _read_report(descriptor: int) -> dict[str, object]:
    raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    os.close(descriptor)
    report: dict[str, Any] = json.loads(raw) if raw else {}
    return report


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
