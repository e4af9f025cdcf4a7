"""A Ray cluster of several nodes on this machine, started as an administrator does: `ray start`, with token authentication."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from kog_dist.bench.engine.session import EngineSession, until

BIN = Path(sys.executable).parent
_STARTED_S = 60.0


class RayDaemons:
    """A head without resources and nodes that are added. Commands of `session` find the cluster; all of it dies with `close`."""

    def __init__(self, session: EngineSession, *, dashboard: bool = False) -> None:
        self.session = session
        self._nodes: list[subprocess.Popen[bytes]] = []
        session.variables |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}",
        }  # fmt: skip
        shown = ["--dashboard-port=0"] if dashboard else ["--include-dashboard=false"]
        self._wait(self._begin("--head", "--num-cpus=0", "--port=0", *shown, f"--temp-dir={session.folder / 'ray'}"))
        found = re.search(r"--address='([\d.]+:\d+)'", self._output(0))
        assert found is not None, self._output(0)
        self.address = found[1]
        session.variables |= {"RAY_ADDRESS": self.address}
        if dashboard:
            address = re.search(r"http://[\d.]+:\d+", self._output(0))
            assert address is not None, self._output(0)
            session.variables |= {"RAY_API_SERVER_ADDRESS": address[0]}

    def add_node(self, num_cpus: int) -> int:
        """Start a node; returns the pid of its raylet."""
        return self.begin_node(num_cpus)()

    def begin_node(self, num_cpus: int) -> Callable[[], int]:
        """The same without waiting; what is returned waits until the node has joined."""
        number = self._begin(f"--address={self.address}", f"--num-cpus={num_cpus}")

        def joined() -> int:
            self._wait(number)
            return next(raylet for raylet in self.raylets() if _is_below(raylet, self._nodes[number].pid))

        return joined

    def raylets(self) -> set[int]:
        """Pids of all raylets of the cluster."""
        return {int(line.split()[0]) for line in self.session.survivors() if "/raylet/raylet " in line}

    def _begin(self, *arguments: str) -> int:
        number = len(self._nodes)
        fixed = (
            "--object-store-memory=80000000",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--disable-usage-stats",
            "--block",
        )
        with (self.session.folder / f"node{number}.out").open("wb") as out:
            process = subprocess.Popen(
                [str(BIN / "ray"), "start", *arguments, *fixed], env=self.session.environment() | {"RAY_ADDRESS": ""},
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._nodes.append(process)
        return number

    def _wait(self, number: int) -> None:
        """Until a node's `ray start` has said the last of what it has to say."""
        until(lambda: "--block" in self._output(number), _STARTED_S, lambda: self._output(number))

    def _output(self, number: int) -> str:
        return (self.session.folder / f"node{number}.out").read_text(encoding="utf-8", errors="replace")

    def engine_processes(self) -> dict[str, int]:
        """Processes of engines by role, without Ray's daemons; actors are `ray::RankActor...`, `ray::EngineHost...`."""
        ours = ("launcher", "reaper", "rank ", "coordinator", "client", "engine host", "ray::RankActor", "ray::EngineHost")
        return {role: pid for role, pid in self.session.processes().items() if role.startswith(ours)}

    def close(self) -> None:
        """End the daemons; the session kills what does not listen."""
        for process in reversed(self._nodes):
            process.terminate()
        for process in self._nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)


def _is_below(pid: int, ancestor: int) -> bool:
    return ancestor in {parent.pid for parent in psutil.Process(pid).parents()}


@contextlib.contextmanager
def ray_daemons(session: EngineSession, *, dashboard: bool = False) -> Iterator[RayDaemons]:
    """A cluster that leaves nothing behind. Jobs need its dashboard."""
    daemons = RayDaemons(session, dashboard=dashboard)
    try:
        yield daemons
    finally:
        daemons.close()
