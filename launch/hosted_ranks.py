"""Ranks whose workers are children of other processes than the launcher: of the processes that mpirun started on this machine.

Such a host process has nothing to do but start the worker and watch it. It is the worker's parent, so that the worker has the
cores, the limits and the devices that mpirun gave to this rank; the worker is not run inside it, because

- it is the same program in the same kind of process under every launcher: the kernel kills it with its parent;
- MPI's threads and handlers stay out of the process that spins on shared memory and owns a GPU;
- somebody is left to say how it ended, whose output is collected, and who can kill it when it does not listen.

Host and launcher talk through a socket; descriptors travel through it, and the worker's pidfd comes back, so that the supervisor
watches these ranks as it watches its own children.

    host -> launcher   {"rank": 3}
    launcher -> host   the worker's arguments                  + control page, rendezvous, output
    host -> launcher   {"pid": 4711}, or {"error": "..."}      + pidfd
    host -> launcher   {"exit_code": -9}
    launcher closes    the engine has ended: kill what still runs
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kog_dist import env
from kog_dist.errors import KogError, LaunchError, RendezvousTimeout
from kog_dist.launch.events import LogFile
from kog_dist.launch.local import WORKER_MODULE, popen
from kog_dist.launch.process import EngineProcess
from kog_dist.runtime.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs

_MAX_BYTES = 1 << 16
_CONNECT_S = 20.0  # for the hosts to have knocked
_ANSWER_S = 20.0  # for a host to start a process, on a busy machine
_REPORT_S = 0.5  # for a host to report the end of its worker
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


# ---- in the launcher ----
class Door:
    """Where hosts come to the launcher: an abstract socket, which leaves no file and has a name that cannot be guessed."""

    def __init__(self, host_name: str) -> None:
        """`host_name` says what a host is, for people: "MPI process"."""
        self.address = f"kog-ranks-{os.getpid()}-{secrets.token_hex(16)}"
        self._host_name = host_name
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(1024)
        self._visitors: dict[int, socket.socket] = {}

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """Have a worker started by the host of every rank that `arguments` are for; see `RankSource`."""
        self._wait_for([rank_arguments.info.rank for rank_arguments in arguments])
        for rank_arguments in arguments:
            yield self._start_rank(rank_arguments, log_dir)

    def close(self) -> None:
        """Tell every host that the engine has ended; one that was stopped hears it, too."""
        for visitor in self._visitors.values():
            pid, _ = _peer(visitor)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)
        for connection in (self._listener, *self._visitors.values()):
            connection.close()

    def _wait_for(self, ranks: Iterable[int]) -> None:
        deadline = Deadline.after(_CONNECT_S)
        while missing := [rank for rank in ranks if rank not in self._visitors]:
            if not select.select([self._listener], [], [], deadline.remaining_s())[0]:
                names = ", ".join(map(str, missing))
                raise RendezvousTimeout(missing, f"the {self._host_name} of rank {names} did not report to the launcher")
            visitor, _ = self._listener.accept()
            if _peer(visitor)[1] != os.getuid():
                visitor.close()
                continue
            visitor.settimeout(_ANSWER_S)
            self._visitors[int(_received(visitor.recv(_MAX_BYTES))["rank"])] = visitor

    def _start_rank(self, arguments: WorkerArgs, log_dir: Path | None) -> HostedWorker:
        rank = arguments.info.rank
        role, visitor = f"rank {rank}", self._visitors[rank]
        log = None if log_dir is None else LogFile(log_dir, role)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        try:
            fds = [arguments.info.control_fd, arguments.info.rendezvous_fd, write_fd]
            socket.send_fds(visitor, [arguments.to_json().encode()], fds)
            raw, pidfds, _, _ = socket.recv_fds(visitor, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            answer = _received(raw)
            if not pidfds:
                raise LaunchError(f"cannot start {role}: {answer['error']}")
            return HostedWorker(role, int(answer["pid"]), visitor, pidfds[0], read_fd, log, self._host_name)
        except (OSError, ValueError, KogError) as error:
            os.close(read_fd)
            if log is not None:
                log.close()
            if isinstance(error, KogError):
                raise
            raise LaunchError(f"cannot start {role}: its {self._host_name} does not answer ({error})") from error
        finally:
            os.close(write_fd)


class HostedWorker(EngineProcess):
    """A worker that is the child of its host, which reports its end."""

    def __init__(
        self, role: str, pid: int, visitor: socket.socket, pidfd: int, stderr_fd: int, log: LogFile | None, host_name: str
    ) -> None:
        super().__init__(role, pid, ended_fd=os.dup(visitor.fileno()), stderr_fd=stderr_fd, log=log)
        visitor.setblocking(False)
        self._visitor, self._pidfd = visitor, pidfd
        self._host = f"{host_name} (pid {_peer(visitor)[0]})"
        self._exit_code: int | None = None
        self._has_lost_host = False
        self._report_due: Deadline | None = None

    @property
    def exit_code(self) -> int | None:
        """See `EngineProcess`. Where the host is gone, the kernel has killed its worker."""
        if self._exit_code is None:
            try:
                raw = self._visitor.recv(_MAX_BYTES)
            except BlockingIOError:
                if not self._is_overdue():
                    return None
                self._exit_code = -signal.SIGKILL
                return self._exit_code
            except OSError:
                raw = b""
            self._has_lost_host = not raw
            self._exit_code = int(_received(raw)["exit_code"]) if raw else -signal.SIGKILL
        return self._exit_code

    @property
    def pidfd(self) -> int:
        """See `EngineProcess`."""
        return self._pidfd

    def how_it_ended(self) -> str:
        """See `EngineProcess`."""
        return f"was killed with its {self._host}" if self._has_lost_host else super().how_it_ended()

    def _is_overdue(self) -> bool:
        """Whether the worker ended long ago and its host, which may be stopped itself, has not said so."""
        if self._report_due is None and self._has_ended():
            self._report_due = Deadline.after(_REPORT_S)
        return self._report_due is not None and self._report_due.expired()

    def _has_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def send(self, signum: int) -> None:
        """See `EngineProcess`."""
        if self._exit_code is None and not self._has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def close(self) -> None:
        """See `EngineProcess`."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


# ---- in a host ----
def knock(address: str, rank: int) -> socket.socket:
    """Come to the launcher's door as the host of a rank. Returns at once: a launcher that is busy finds it there later."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{address}")
        connection.send(json.dumps({"rank": rank}).encode())
    except OSError as error:
        connection.close()
        raise LaunchError(f"rank {rank} cannot reach its launcher: {error.strerror}") from error
    return connection


def host_rank(connection: socket.socket, lifelines: Iterable[int]) -> None:
    """Run the worker of a rank for the launcher at the other end, until the engine or a process of `lifelines` has ended.

    `lifelines` are pidfds. A launcher that is gone has said why, or mpirun does: that is an end like any other.
    """
    ready, _, _ = select.select([connection.fileno(), *lifelines], [], [])
    if connection.fileno() not in ready:
        return
    try:
        raw, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        process = _start_worker(connection, raw, fds) if raw else None
    except ConnectionError:
        return
    if process is not None:
        try:
            _watch(connection, process, lifelines)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_worker(connection: socket.socket, raw: bytes, fds: list[int]) -> subprocess.Popen[bytes] | None:
    control_fd, rendezvous_fd, output_fd = fds
    try:
        sent = WorkerArgs.from_json(raw.decode())
        args = replace(sent, info=replace(sent.info, control_fd=control_fd, rendezvous_fd=rendezvous_fd))
        process = popen(
            f"rank {args.info.rank}",
            WORKER_MODULE,
            [args.to_json()],
            env.child_environment(os.environ),
            (control_fd, rendezvous_fd),
            output_fd,
        )
    except KogError as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        return None
    finally:
        for fd in fds:
            os.close(fd)
    pidfd = os.pidfd_open(process.pid)
    socket.send_fds(connection, [json.dumps({"pid": process.pid}).encode()], [pidfd])
    os.close(pidfd)
    return process


def _watch(connection: socket.socket, process: subprocess.Popen[bytes], lifelines: Iterable[int]) -> None:
    """Return when launcher or lifeline has ended; report the worker's end when it comes first."""
    pidfd = os.pidfd_open(process.pid)
    try:
        ready, _, _ = select.select([connection.fileno(), pidfd, *lifelines], [], [])
        if ready == [pidfd]:
            with contextlib.suppress(ConnectionError):
                connection.send(json.dumps({"exit_code": process.wait()}).encode())
            select.select([connection.fileno(), *lifelines], [], [])
    finally:
        os.close(pidfd)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Pid and user of the process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, uid, _ = _PEER_CREDENTIALS.unpack(raw)
    return pid, uid


def _received(raw: bytes) -> dict[str, Any]:
    """A message of the other side. Raises ValueError; an empty one means that it is gone."""
    if not raw:
        raise ValueError("it is gone")
    message = json.loads(raw)
    if not isinstance(message, dict):
        raise ValueError(f"it sent {message!r}")
    return message
