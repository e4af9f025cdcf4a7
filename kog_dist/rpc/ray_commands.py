"""`kog-client stop` and `logs` with `--ray`: what they do here for an engine of this machine, an actor does on its node."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import ConfigError, LaunchError
from kog_dist.rpc.instance_commands import DEFAULT_LOG, FOLLOW_S, last_sentence, show, stop_limit_s, stopped
from kog_dist.rpc.log_tail import LogTail, log_names
from kog_dist.rpc.output import check_stdout, write_error
from kog_dist.rpc.ray_engines import EngineOnRay, answer_of, find_engines
from kog_dist.runtime.launcher_file import LauncherFile, ask_to_stop
from kog_dist.runtime.ray_join import join, resolve_address

_ASK_S: Final = 5.0  # that one question waits for the end of a process


class NodeAgent:
    """A process and its logs, for whoever cannot see them. Runs on the node of `file`."""

    def __init__(self, file: LauncherFile) -> None:
        self._file, self._pidfd = file, file.open()
        self._tail: LogTail | None = None

    def ask_to_stop(self, at_once: bool) -> str:
        """See `ask_to_stop`; returns why that is impossible."""
        with suppress(PermissionError):
            if self._pidfd is not None:
                ask_to_stop(self._pidfd, at_once=at_once)
            return ""
        return (
            f"its launcher (pid {self._file.pid}) belongs to another user than Ray does; kog-client drain asks the engine itself"
        )

    def has_ended(self, timeout_s: float) -> bool:
        """Whether the process has, at the latest after so many seconds."""
        return self._pidfd is None or bool(select.select([self._pidfd], [], [], timeout_s)[0])

    def last_sentence(self) -> str | None:
        """See `last_sentence`."""
        return None if self._file.log_dir is None else last_sentence(Path(self._file.log_dir))

    def log_names(self) -> list[str]:
        """Processes that have a log here."""
        return [] if self._file.log_dir is None else log_names(Path(self._file.log_dir))

    def open_log(self, process: str, num_lines: int) -> bytes:
        """Its last lines; `news` goes on behind them."""
        assert self._file.log_dir is not None, "it has logs, as log_names said"
        self._tail = LogTail(Path(self._file.log_dir) / f"{process}.log")
        return self._tail.last_lines(num_lines)

    def news(self) -> tuple[bytes, bool]:
        """What was written since, and whether more may come."""
        assert self._tail is not None, "open_log was called"
        may_come = not self.has_ended(0.0)
        return self._tail.news(), may_come


def stop(address: str, instance: str | None, *, at_once: bool) -> int:
    """See `instance_commands.stop`, for an engine that Ray has placed."""
    check_stdout()
    name, begin_s = instance or "default", time.monotonic()
    with _joined(address):
        engine = find_engines(name)[0]
        launcher = engine.launcher
        agent = _agent(engine.launcher_node, launcher)
        if why_not := answer_of(agent.ask_to_stop.remote(at_once)):
            raise LaunchError(f"engine {name} cannot be stopped from here: {why_not}")
        end_s = time.monotonic() + stop_limit_s(launcher, at_once=at_once)
        while not answer_of(agent.has_ended.remote(_ASK_S)):
            if time.monotonic() > end_s:
                raise LaunchError(f"engine {name} has not ended; end process {launcher.pid} of its launcher's node")
        sentence = answer_of(agent.last_sentence.remote())
    return stopped(name, time.monotonic() - begin_s, sentence)


def logs(address: str, instance: str | None, process: str | None, *, num_lines: int, follow: bool) -> int:
    """See `instance_commands.logs`, for an engine that Ray has placed and that runs."""
    check_stdout()
    with _joined(address), suppress(BrokenPipeError):  # whoever reads them has enough
        agent = _agent_with_log(find_engines(instance or "default"), process or DEFAULT_LOG)
        show(answer_of(agent.open_log.remote(process or DEFAULT_LOG, num_lines)))
        may_come = follow
        while may_come:
            text, may_come = answer_of(agent.news.remote())
            show(text)
            time.sleep(FOLLOW_S if may_come else 0.0)
    return 0


@contextmanager
def _joined(given: str) -> Iterator[None]:
    """This process is one of the cluster's. Raises ConfigError, LaunchError."""
    address = resolve_address(given, os.environ, lambda said: write_error(f"kog-client: {said}"), "--ray")
    if address is None:
        found = "no cluster of this machine" if given == "auto" else "no cluster"
        raise ConfigError(f"--ray {given!r} names {found}; give its HOST:PORT, or for a private one --instance alone")
    join(address, "--ray")
    import ray

    try:
        yield
    finally:
        ray.shutdown()


def _agent(node_id: str, file: LauncherFile) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(NodeAgent).options(num_cpus=0, scheduling_strategy=there).remote(file)


def _agent_with_log(engines: Sequence[EngineOnRay], process: str) -> Any:
    """On the launcher's node if it has a log of that name, else on that of an engine. Raises ConfigError."""
    first = engines[0]
    places = [(first.launcher_node, first.launcher), *((engine.host_node, engine.host) for engine in engines)]
    found: set[str] = set()
    for node_id, file in places:
        agent = _agent(node_id, file)
        names = answer_of(agent.log_names.remote())
        if process in names:
            return agent
        found |= set(names)
    listed = ", ".join(sorted(found)) or "none"
    raise ConfigError(f"there is no log of {process!r}; there are {listed}. Ranks on Ray keep logs with --log-dir FOLDER")
