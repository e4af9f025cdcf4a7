"""Child processes on this machine: started so that none can outlive the launcher, watched through pidfds."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from kog_dist import env
from kog_dist.errors import LaunchError, remedy_of
from kog_dist.launch.events import LogFile
from kog_dist.launch.process import EngineProcess
from kog_dist.rpc.prompt_request import PromptRequest
from kog_dist.system import python_child
from kog_dist.system.parent_death import die_with_parent
from kog_dist.workers.arguments import WorkerArgs

WORKER_MODULE: Final = "kog_dist.workers.worker"


class Child(EngineProcess):
    """A child of this process, in a process group of its own."""

    def __init__(self, role: str, process: subprocess.Popen[bytes], stderr_fd: int, log: LogFile | None) -> None:
        super().__init__(role, process.pid, ended_fd=os.pidfd_open(process.pid), stderr_fd=stderr_fd, log=log)
        self.process = process

    @property
    def exit_code(self) -> int | None:
        """See `EngineProcess`. Reaps the process."""
        return self.process.poll()

    @property
    def pidfd(self) -> int:
        """See `EngineProcess`."""
        return self.ended_fd

    def send(self, signum: int) -> None:
        """See `EngineProcess`."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)


class LocalRanks:
    """Ranks that are children of the launcher. The form that every launcher's ranks have: see `RankSource` in engine.py."""

    origin = ""
    lifelines: Mapping[int, str] = {}
    is_killed_soon = False

    def start(self, arguments: Sequence[WorkerArgs], log_dir: Path | None) -> Iterator[EngineProcess]:
        """See `RankSource`."""
        for rank_arguments in arguments:
            yield spawn_rank(rank_arguments, log_dir)


def spawn_rank(arguments: WorkerArgs, log_dir: Path | None) -> Child:
    """Start the worker of a rank as a child of this process. Raises LaunchError."""
    return spawn(
        f"rank {arguments.info.rank}",
        WORKER_MODULE,
        [arguments.to_json()],
        environment=env.child_environment(os.environ),
        pass_fds=(arguments.info.control_fd, arguments.info.rendezvous_fd),
        log_dir=log_dir,
    )


def spawn_client(request: PromptRequest, where: Sequence[str]) -> Child:
    """Start the `kog-client generate` of `kog-launch --prompt`, which prints to this terminal. Raises LaunchError.

    `where`: the flags that lead it to the engine. It gets the request through a file without a name.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(env.PREFIX)}
    request_fd = request.write()
    try:
        arguments = ["generate", *where, f"--request-fd={request_fd}"]
        return spawn("client", "kog_dist.rpc.cli", arguments, environment=environment, pass_fds=[request_fd], on_terminal=True)
    finally:
        os.close(request_fd)


def spawn(
    role: str,
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    log_dir: Path | None = None,
    on_terminal: bool = False,
) -> Child:
    """Start `python -m module arguments` in a process group of its own, so that Ctrl-C reaches only the launcher.

    Its output is collected, and the kernel kills it when the launcher dies. With `on_terminal` the output is the launcher's, the
    reaper looks after it, and it ignores SIGINT until it is ready to answer to one. Raises LaunchError if it, or its log, cannot
    be had.
    """
    log = None if log_dir is None or on_terminal else LogFile(log_dir, role)
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    output_fd = None if on_terminal else write_fd
    try:
        process = popen(role, module, arguments, environment, pass_fds, output_fd, is_tied=not on_terminal)
    except LaunchError:
        os.close(read_fd)
        if log is not None:
            log.close()
        raise
    finally:
        os.close(write_fd)
    return Child(role, process, read_fd, log)


def popen(
    role: str,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    pass_fds: Sequence[int],
    output_fd: int | None,
    *,
    is_tied: bool = True,
) -> subprocess.Popen[bytes]:
    """The process itself, its output going to `output_fd` (None: to the caller's). Raises LaunchError.

    A tied one is killed by the kernel when the caller dies; one that is not tied prints to the terminal from the background.
    """
    try:
        return subprocess.Popen(
            python_child.command(module, *arguments),
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            env=dict(environment),
            pass_fds=tuple(pass_fds),
            process_group=0,
            preexec_fn=_die_with(os.getpid()) if is_tied else _prepare_for_terminal,
        )
    except (OSError, subprocess.SubprocessError) as error:
        remedy = remedy_of(error, "free memory or raise the process limit")
        raise LaunchError(f"cannot start {role}: {error}; {remedy}") from error


def _prepare_for_terminal() -> None:
    """For the child between fork and exec: its group is in the background, and `stty tostop` would stop it as it prints."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)


def _die_with(parent_pid: int) -> Callable[[], None]:
    """For the child between fork and exec: be killed when the parent dies, also if that has happened already."""

    def arrange() -> None:
        if not die_with_parent(parent_pid):
            os._exit(1)

    return arrange
