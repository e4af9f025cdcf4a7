"""`mpirun -n 8 kog-launch MODEL`: every process that mpirun started hosts one rank, and the one of rank 0 is the launcher, too.

MPI is needed for one exchange: who is where, and where the launcher's door is. After that every process leaves MPI (MPI_Finalize)
and goes on as the launchers of all kinds do, so that nobody can be caught in an MPI call, nothing of MPI polls while the engine
runs, and the launcher alone decides on the end. It is the supervisor of a plain engine with another source of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kog_dist.config import SETTINGS, LaunchConfig, flag_name
from kog_dist.errors import ConfigError, KogError, LaunchError, install
from kog_dist.launch.hosted_ranks import Door, host_rank, knock
from kog_dist.launch.local import spawn_rank
from kog_dist.launch.mpi.pair import OPEN_MPI, check_flavour, check_world_size, library_name
from kog_dist.launch.mpi.starter import starter_lifelines
from kog_dist.launch.mpi.watchdog import Watchdog, remove_shared_memory
from kog_dist.launch.process import EngineProcess
from kog_dist.launch.supervisor import supervise as supervise_engine
from kog_dist.records import dataclass
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.runtime.mpi_rendezvous import MpiRendezvous
from kog_dist.runtime.rank_env import RankVariables, read_rank_variables
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs

if TYPE_CHECKING:
    from types import ModuleType

_HOST = "MPI process"
_FIRST_WORD_S = 1.0  # what all ranks see at the same time, the others leave to rank 0 to say


@dataclass(frozen=True, slots=True)
class Identity:
    """What one process tells the others. `door` is where the launcher lets hosts in, None of the other ranks."""

    host: str
    boot_id: str
    namespaces: str  # of process ids and of the network: what descriptors and sockets must have in common
    uid: int
    settings: dict[str, Any]
    door: str | None


@dataclass(frozen=True, slots=True)
class MpiMeeting:
    """What a process has after the exchange: the launcher its door, which everyone has come to, the others the way to it."""

    library: str
    identities: list[Identity]
    door: Door | None
    connection: socket.socket | None


class MpiRanks:
    """See `RankSource`: the worker of rank 0 is a child of the launcher, the others are children of their MPI processes."""

    def __init__(self, library: str, lifelines: Mapping[int, str], door: Door) -> None:
        self.origin = library
        self.lifelines = lifelines
        self.is_killed_soon = library.startswith(OPEN_MPI)  # 0.25 s after the signal, whatever its settings
        self._door = door

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """See `RankSource`."""
        yield spawn_rank(arguments[0], log_dir)
        yield from self._door.start(arguments[1:], log_dir)


def supervise(settings: LaunchConfig, request: PromptRequest | None) -> int:
    """Run an engine on the processes that mpirun started; every one of them calls it. See `launch.supervisor.supervise`.

    Only rank 0 says something, raises, or returns another exit code than 0.
    """
    found = read_rank_variables(os.environ)
    try:
        meeting = _meet(settings, request, found)
        check_world_size(found, meeting.library, len(meeting.identities))
        world_settings = check_gang(meeting.identities, settings)
    except KogError:
        if found is not None and found.rank > 0:
            return 0  # rank 0 has found the same
        raise
    lifelines = starter_lifelines(found) if found is not None else {}
    if meeting.connection is not None:
        _host(meeting.connection, lifelines)
        return 0
    assert meeting.door is not None
    with contextlib.closing(meeting.door) as door:
        return supervise_engine(world_settings, request, MpiRanks(meeting.library, lifelines, door))


def check_gang(identities: Sequence[Identity], settings: LaunchConfig) -> LaunchConfig:
    """The settings of the engine that these processes make. Raises ConfigError or LaunchError saying why they make none."""
    first, world_size = identities[0], len(identities)
    for rank, other in enumerate(identities):
        if other.boot_id != first.boot_id:
            raise LaunchError(
                f"rank {rank} is on host {other.host}, rank 0 on {first.host}: an engine's ranks share the memory of one host; "
                f"run mpirun -n {world_size} on one host, or engines on several with --launcher ray --replicas"
            )
        if other.namespaces != first.namespaces:
            raise LaunchError(f"rank {rank} and rank 0 are in different containers; run all ranks of an engine in one")
        if other.uid != first.uid:
            raise LaunchError(f"rank {rank} belongs to user {other.uid}, rank 0 to user {first.uid}; start all ranks as one user")
        for name, value in first.settings.items():
            if other.settings[name] != value:
                what = flag_name(name) if name in SETTINGS else name
                raise ConfigError(f"rank {rank} was started with another {what} than rank 0; give all ranks the same flags")
    if settings.ranks not in (0, world_size):
        raise ConfigError(
            f"--ranks {settings.ranks} contradicts mpirun -n {world_size}, where every process is one rank; leave --ranks out"
        )
    return replace(settings, ranks=world_size)


def _is_one_machine(identities: Sequence[Identity]) -> bool:
    return len({(identity.boot_id, identity.namespaces) for identity in identities}) == 1


def _meet(settings: LaunchConfig, request: PromptRequest | None, found: RankVariables | None) -> MpiMeeting:
    """The one exchange over MPI, from MPI_Init to MPI_Finalize. An exception inside ends the whole job: this is the abort hook.

    Without it the others would wait in MPI for a process that is gone.
    """
    mpi = _load_mpi()
    library = library_name(mpi.Get_library_version())
    check_flavour(found, library)
    is_first = found is None or found.rank == 0
    limit_s = settings.startup_timeout + (0.0 if is_first else _FIRST_WORD_S)
    watchdog = Watchdog.start(limit_s + 2 * _FIRST_WORD_S, speaks=is_first)
    mpi.Init_thread(mpi.THREAD_FUNNELED)
    comm = mpi.COMM_WORLD
    try:
        rank = comm.Get_rank()
        door = Door(_HOST) if rank == 0 else None
        payload = json.dumps(asdict(_identity(settings, request, door))).encode()
        rendezvous, deadline = MpiRendezvous(comm, aborted=lambda: False), Deadline.after(limit_s)
        identities = [Identity(**json.loads(raw)) for raw in rendezvous.all_gather_bytes(payload, deadline)]
        connection = None
        if rank > 0 and _is_one_machine(identities):
            connection = knock(str(identities[0].door), rank)
        rendezvous.barrier(deadline)  # from here on a host that is gone is a connection that is closed
    except BaseException as error:
        _last_words(error, comm.Get_rank())
        remove_shared_memory(os.getpid())
        code = error.exit_code if isinstance(error, KogError) else 1
        comm.Abort(code)
        os._exit(code)  # MPICH's may return when the others are gone already; all has been said
    mpi.Finalize()
    watchdog.dismiss()
    return MpiMeeting(library, identities, door, connection)


def _identity(settings: LaunchConfig, request: PromptRequest | None, door: Door | None) -> Identity:
    return Identity(
        host=socket.gethostname(),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        namespaces=" ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")),
        uid=os.getuid(),
        settings={
            **asdict(settings),
            "api_key": settings.api_key is not None,
            "prompt": None if request is None else asdict(request),
        },
        door=None if door is None else door.address,
    )


def _load_mpi() -> ModuleType:
    """mpi4py's MPI module, which has not called MPI_Init yet. Raises LaunchError when it, or its library, is not there."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LaunchError(f"mpi4py cannot be used ({first}); {install('mpi')} brings it with MPICH") from error
    return MPI


def _host(connection: socket.socket, lifelines: Mapping[int, str]) -> None:
    """The rest of the life of a process that is not the launcher. Stop signals, which mpirun sends to all, are the launcher's."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda _signum, _frame: None)  # not SIG_IGN, which the worker would inherit
    with connection:
        host_rank(connection, lifelines)


def _last_words(error: BaseException, rank: int) -> None:
    """Why the job is being ended, on stderr: from MPI_Abort on nothing more is run."""
    stderr = sys.__stderr__ or sys.stderr
    said = f"{error}\n" if isinstance(error, KogError) else f"rank {rank}:\n{''.join(traceback.format_exception(error))}"
    stderr.write(f"kog-launch: {said}")  # at once: mpirun may lose what it has not read when the job is aborted
    stderr.flush()
