"""An engine as users start it, in a runtime folder of its own: for benchmarks and end-to-end tests, which look from outside."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kog_dist.bench.engine.processes import command_line, marked_processes, parents
from kog_dist.env import PREFIX
from kog_dist.errors import KogError, LaunchError
from kog_dist.rpc.client import Client
from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.rpc.transport import Access
from kog_dist.runtime.instance import process_start_time
from kog_dist.runtime.rank_env import read_rank_variables
from kog_dist.system import python_child

INSTANCE = "engine"
_MARK = "ENGINE_SESSION"
_POLL_S, _MOST_S = 0.002, 0.02
_PATIENCE = 3.0  # times what a look has taken
_LAST_WORDS_S = 3.0


class TimedOut(AssertionError):
    """Something that was waited for did not happen in time."""


class EngineSession:
    """One `kog-launch` and all that it starts. Processes are found by a variable that they inherit, whoever their parent is."""

    def __init__(self) -> None:
        self.starter: tuple[str, ...] = ()  # put before each command: mpirun -n 4
        self.variables: dict[str, str] = {}  # added to the environment of each command
        self.cwd: Path | None = None  # where each command starts
        self.folder = Path(tempfile.mkdtemp(prefix="kog-e-"))
        self.mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []
        self._bare: set[tuple[int, int]] = set()  # children without our variable: pid and start time

    # ---- commands ----
    def environment(self) -> dict[str, str]:
        """What commands see: no settings of the caller, own folders for sockets and logs, no colours, no HTTP but with --http."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        return {
            **inherited,
            _MARK: self.mark,
            "XDG_RUNTIME_DIR": str(self.folder),
            "XDG_STATE_HOME": str(self.folder / "state"),
            "NO_COLOR": "1",
            "KOG_HTTP": "no",
            **self.variables,
        }

    def run(self, module: str, arguments: Sequence[str], timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run `python -m module arguments` to its end."""
        command, none = [*self.starter, *python_child.command(module, *arguments)], subprocess.DEVNULL
        return subprocess.run(
            command,
            cwd=self.cwd,
            env=self.environment(),
            stdin=none,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, module: str, arguments: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start `python -m module arguments`; its output goes to files, see `output`."""
        return self.start_command([*self.starter, *python_child.command(module, *arguments)], name)

    def start_command(self, command: Sequence[str], name: str) -> subprocess.Popen[bytes]:
        """Start any program as `start` does. Raises OSError if it cannot be."""
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            process = subprocess.Popen(
                command, cwd=self.cwd, env=self.environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        self._started.append(process)
        return process

    def launch(self, *arguments: str, name: str = "launch") -> subprocess.Popen[bytes]:
        """Start `kog-launch --instance engine arguments`."""
        return self.start("kog_dist.launch.cli", [*arguments, f"--instance={INSTANCE}"], name)

    def output(self, name: str = "launch", stream: str = "err") -> str:
        """What a started command has written so far; `stream` is out or err."""
        return (self.folder / f"{name}.{stream}").read_text(encoding="utf-8", errors="replace")

    # ---- the engine ----
    @property
    def instance_folder(self) -> Path:
        """Folder of the instance that `launch` starts."""
        return self.folder / "kog" / INSTANCE

    def connect(self, timeout_s: float = 30.0) -> Client:
        """A client of the engine once it is ready."""
        socket = self.instance_folder / SOCKET_NAME
        client = None
        try:
            until(lambda: socket.exists() or self._has_ended(), timeout_s, lambda: f"no socket; launcher says: {self.output()}")
            if not socket.exists():
                raise LaunchError("it ended before it listened")  # the message below has what it said
            client = Client(Access.from_folder(self.instance_folder), connect_timeout_s=timeout_s, patient=True)
            client.wait_ready(timeout_s)
        except KogError as error:
            if client is not None:
                client.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                if self._started:
                    self._started[-1].wait(_LAST_WORDS_S)
            raise LaunchError(f"the engine did not become ready: {self.output().strip() or error}") from error
        return client

    def _has_ended(self) -> bool:
        return bool(self._started) and self._started[-1].poll() is not None

    def processes(self) -> dict[str, int]:
        """Pids of the live processes by role: launcher, reaper, coordinator, client, rank 0 ...

        With MPI host 1 ..., mpirun; with replicas router, and what belongs to one is `rank 0 of r1`.
        """
        found: dict[str, int] = {}
        # A launcher comes before the reaper that it forks. Pids alone do not say so: at their end they begin anew.
        started = [(process_start_time(pid), pid, command, environ) for pid, command, environ in self._marked()]
        alive = [(start, pid, command, environ) for start, pid, command, environ in started if start is not None]
        for _, pid, command, environ in sorted(alive, key=lambda process: process[:2]):
            role = _role(command, environ, found)
            if not role.startswith("reaper") or _leads_session(pid):  # else a child that has still to become its own program
                found.setdefault(role, pid)
        return found

    def pids(self) -> list[int]:
        """Of everything that still runs."""
        return [pid for pid, *_ in self._marked()]

    def survivors(self) -> list[str]:
        """Command lines of everything that still runs."""
        return [f"{pid} {' '.join(command)[:160]}" for pid, command, _ in self._marked()]

    def leftovers(self) -> list[str]:
        """Processes and files of engines that still exist. The file of a GPU's lease stays for the next engine, but unlocked."""
        found = os.walk(self.folder / "kog")  # which takes no offence at folders that vanish meanwhile
        paths = [Path(folder, name) for folder, folders, files in found for name in (*folders, *files)]
        return self.survivors() + [str(path) for path in paths if not _is_free_lease(path)]

    def _marked(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        """Of every live process of this session, as `marked_processes`; and of children that inherit no variables."""
        marked = list(marked_processes(f"{_MARK}={self.mark}"))
        pids = {pid for pid, *_ in marked}
        yield from marked
        for pid, parent, start in parents():
            if pid not in pids and (parent in pids or (pid, start) in self._bare):
                with contextlib.suppress(OSError):
                    if command := command_line(pid):
                        self._bare.add((pid, start))
                        yield pid, command, {}

    def close(self) -> None:
        """Kill what is left and remove the folder."""
        for started in self._started:  # by name: the kernel shows no environment of a process that has just become its program
            started.kill()
        for pid, *_ in self._marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for started in self._started:
            started.wait(timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def engine_session() -> Iterator[EngineSession]:
    """A session that leaves nothing behind, also where SIGTERM or SIGHUP ends this process."""
    with _leaving_in_order():
        session = EngineSession()
        try:
            yield session
        finally:
            session.close()


@contextmanager
def _leaving_in_order() -> Iterator[None]:
    """Signals that would end this process at once raise SystemExit meanwhile. Only in the main thread, which alone gets them."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    ending = [one for one in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(one) is signal.SIG_DFL]
    for one in ending:
        signal.signal(one, leave)
    try:
        yield
    finally:
        for one in ending:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def running(*arguments: str) -> Iterator[tuple[EngineSession, Client]]:
    """An engine that is ready, and a client of it; stopped by SIGTERM at the end."""
    with engine_session() as session:
        launcher = session.launch(*arguments)
        with session.connect() as client:
            yield session, client
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=20)


def until(condition: Callable[[], object], timeout_s: float, failure: Callable[[], str]) -> float:
    """Poll until `condition` is true; returns the seconds it took. Raises TimedOut with the text of `failure`.

    Who waits for an engine leaves it most of a core: between two looks it sleeps longer than one takes.
    """
    begin_s = look_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - begin_s > timeout_s:
            raise TimedOut(f"not after {timeout_s:g} s: {failure()}")
        time.sleep(max(_POLL_S, min(_PATIENCE * (now_s - look_s), _MOST_S)))
        look_s = time.monotonic()
    return time.monotonic() - begin_s


def _is_free_lease(path: Path) -> bool:
    """Whether it is the file of a lease (launch/gpu_leases.py) that nobody holds."""
    if path.suffix != ".lease":
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leads_session(pid: int) -> bool:
    """Whether a process has made a session of its own, as reapers do. False once it has ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.getsid(pid) == pid
    return False


def _role(command: Sequence[str], environ: Mapping[str, str], found: Mapping[str, int]) -> str:
    program = Path(command[0]).name if command else ""
    if not program.startswith("python"):
        return program  # mpirun and what belongs to it
    module = next((command[i + 1] for i, word in enumerate(command[:-1]) if word == "-m"), "")
    if not module.startswith("kog_dist."):
        return program  # Ray's daemons
    if module == "kog_dist.workers.worker":
        info = json.loads(command[-1])["info"]
        return f"rank {info['rank']}{_of_replica(info['instance'])}"
    if module == "kog_dist.workers.coordinator.process":
        return f"coordinator{_of_replica(json.loads(command[-1])['instance'])}"
    if module == "kog_dist.launch.ray.host":
        return "reaper of the engine host" if "engine host" in found else "engine host"
    if module == "kog_dist.gateway.process":
        return "gateway"
    if module == "kog_dist.gateway.body_process":
        return "body process"
    if module == "kog_dist.model.template_sandbox":
        return "template process"
    if module == "kog_dist.router.process":
        return "router"
    if module in ("kog_dist.workers.grammar.process", "kog_dist.workers.grammar.ahead"):
        return "grammar checker" if json.loads(command[-1])["checks"] else "grammar runner"
    if module == "kog_dist.rpc.cli":
        return "client"
    ranks = read_rank_variables(environ)
    if ranks is not None and ranks.rank > 0:
        return f"host {ranks.rank}"
    instance = next((word.partition("=")[2] for word in command if word.startswith("--instance=")), "")
    launcher = f"launcher{_of_replica(instance)}"
    return launcher.replace("launcher", "reaper") if launcher in found else launcher


def _of_replica(instance: str) -> str:
    """` of r0` for the instance name of a replica."""
    _, dot, name = instance.rpartition(".")
    return f" of {name}" if dot else ""
