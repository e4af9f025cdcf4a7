"""How rank actors and the engine's host process on one node work together: a socket in the instance folder.

The host process owns the engine (launch/ray_host.py); a rank's worker is a child of the rank's actor, so that it holds the
actor's GPU exactly as long as the actor lives: the kernel kills the worker when the actor dies, whatever kills it. Descriptors
(control page, rendezvous, output) travel through the socket, and the worker's pidfd comes back, so the supervisor watches these
ranks as it watches its own children.

    actor -> host   {"rank": 3}
    host -> actor   the worker's arguments                      + control page, rendezvous, output
    actor -> host   {"pid": 4711}, or {"error": "..."}          + pidfd
    actor -> host   {"exit_code": -9}
    host closes     the engine has ended: kill what still runs
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

from kog_dist import env
from kog_dist.errors import AbortedError, LaunchError, RendezvousTimeout
from kog_dist.launch.events import open_log
from kog_dist.launch.local import WORKER_MODULE, popen
from kog_dist.launch.process import EngineProcess
from kog_dist.wait import Deadline
from kog_dist.workers.arguments import WorkerArgs

DOOR_NAME = "ranks.sock"
_MAX_BYTES = 1 << 16
_POLL_S = 0.05
_ANSWER_S = 20.0  # for an actor to start a process, on a busy machine
_REPORT_S = 0.5  # for an actor to report the end of its worker


# ---- in the host process ----
class ActorRanks:
    """Ranks that are children of Ray actors; see `RankSource`. `open` it once the instance folder exists."""

    lifelines: Mapping[int, str] = {}

    def __init__(self, origin: str, deadline: Deadline, aborted: Callable[[], bool]) -> None:
        """Actors are waited for until the deadline, or until `aborted`."""
        self.origin = origin
        self._deadline, self._aborted = deadline, aborted
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._visitors: dict[int, socket.socket] = {}

    def open(self, folder: Path) -> Path:
        """Listen in the instance folder; returns what to tell the actors. They may connect before anybody waits for them."""
        path = folder / DOOR_NAME
        self._listener.bind(os.fspath(path))
        path.chmod(0o600)
        self._listener.listen(1024)
        return path

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """See `RankSource`. Raises RendezvousTimeout naming the ranks whose actors did not come, AbortedError."""
        while len(self._visitors) < len(arguments):
            if self._aborted():
                raise AbortedError("the engine was stopped before every rank's actor had come")
            if self._deadline.expired():
                missing = [rank for rank in range(len(arguments)) if rank not in self._visitors]
                names = ", ".join(map(str, missing))
                raise RendezvousTimeout(missing, f"the Ray actor of rank {names} did not report to the engine's host")
            if select.select([self._listener], [], [], min(_POLL_S, self._deadline.remaining_s()))[0]:
                visitor, _ = self._listener.accept()
                visitor.settimeout(_ANSWER_S)
                self._visitors[int(_received(visitor.recv(_MAX_BYTES))["rank"])] = visitor
        for rank_arguments in arguments:
            yield self._start_rank(rank_arguments, log_dir)

    def _start_rank(self, arguments: WorkerArgs, log_dir: Path | None) -> ActorsWorker:
        rank = arguments.info.rank
        role, visitor = f"rank {rank}", self._visitors[rank]
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read_fd, False)
        try:
            fds = [arguments.info.control_fd, arguments.info.rendezvous_fd, write_fd]
            socket.send_fds(visitor, [arguments.to_json().encode()], fds)
            raw, pidfds, _, _ = socket.recv_fds(visitor, _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            answer = _received(raw)
            if not pidfds:
                raise LaunchError(f"cannot start {role}: {answer['error']}")
            log = None if log_dir is None else open_log(log_dir, role)
        except (OSError, ValueError) as error:
            os.close(read_fd)
            raise LaunchError(f"cannot start {role}: its Ray actor does not answer ({error}); look at the actor's log") from error
        except LaunchError:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return ActorsWorker(role, int(answer["pid"]), visitor, pidfds[0], read_fd, log)

    def close(self) -> None:
        """Tell every actor that the engine has ended."""
        for connection in (self._listener, *self._visitors.values()):
            connection.close()


class ActorsWorker(EngineProcess):
    """A worker that is the child of an actor, which reports its end."""

    def __init__(
        self, role: str, pid: int, visitor: socket.socket, pidfd: int, stderr_fd: int, log: FileIO | None
    ) -> None:  # fmt: skip
        super().__init__(role, pid, ended_fd=os.dup(visitor.fileno()), stderr_fd=stderr_fd, log=log)
        self._visitor, self._pidfd = visitor, pidfd
        visitor.setblocking(False)
        self._exit_code: int | None = None
        self._report_due: Deadline | None = None

    @property
    def exit_code(self) -> int | None:
        """See `EngineProcess`. Where the actor is gone, the kernel has killed its worker."""
        if self._exit_code is None:
            try:
                raw = self._visitor.recv(_MAX_BYTES)
            except BlockingIOError:
                if not self._is_overdue():
                    return None
                raw = b""
            except OSError:
                raw = b""
            self._exit_code = int(_received(raw)["exit_code"]) if raw else -signal.SIGKILL
        return self._exit_code

    def _is_overdue(self) -> bool:
        """Whether the worker ended long ago and its actor, which may be stopped itself, has not said so."""
        if self._report_due is None and select.select([self._pidfd], [], [], 0)[0]:
            self._report_due = Deadline.after(_REPORT_S)
        return self._report_due is not None and self._report_due.expired()

    def send(self, signum: int) -> None:
        """See `EngineProcess`."""
        if self._exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def close(self) -> None:
        """See `EngineProcess`."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


# ---- in a rank's actor ----
def run_rank(door: Path, rank: int) -> None:
    """Start the rank's worker for the engine behind `door` and watch it until the engine has ended.

    Call it in a thread that lives as long as the process: the worker is killed with it. Raises LaunchError without an engine.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(os.fspath(door))
            connection.send(json.dumps({"rank": rank}).encode())
            raw, fds, _, _ = socket.recv_fds(connection, _MAX_BYTES, 3, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise LaunchError(f"rank {rank} cannot reach the engine at {door}: {error.strerror}") from error
        if not raw:
            return  # the engine has ended before it wanted this rank
        process = _start_worker(connection, raw, fds)
        if process is not None:
            try:
                _watch(connection, process)
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
            f"rank {args.info.rank}", WORKER_MODULE, [args.to_json()], env.child_environment(os.environ),
            (control_fd, rendezvous_fd), output_fd,
        )  # fmt: skip
    except LaunchError as error:
        connection.send(json.dumps({"error": str(error)}).encode())
        return None
    finally:
        for fd in fds:
            os.close(fd)
    pidfd = os.pidfd_open(process.pid)
    socket.send_fds(connection, [json.dumps({"pid": process.pid}).encode()], [pidfd])
    os.close(pidfd)
    return process


def _watch(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Return when the engine has ended; report the worker's end when it comes first."""
    pidfd = os.pidfd_open(process.pid)
    try:
        if connection.fileno() not in select.select([connection.fileno(), pidfd], [], [])[0]:
            with contextlib.suppress(OSError):
                connection.send(json.dumps({"exit_code": process.wait()}).encode())
            connection.recv(1)
    finally:
        os.close(pidfd)


def _received(raw: bytes) -> dict[str, Any]:
    """A message of the other side. Raises ValueError; an empty one means that it is gone."""
    if not raw:
        raise ValueError("it is gone")
    message = json.loads(raw)
    if not isinstance(message, dict):
        raise ValueError(f"it sent {message!r}")
    return message
