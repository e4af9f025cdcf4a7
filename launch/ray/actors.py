"""The Ray actors of one engine: its host, and one per rank. Each starts the process that does the work and watches it.

An actor's process is not a rank itself: Ray's threads would share the interpreter lock with the heartbeat, a crash would take
the cause with it, and numpy would be loaded before the thread counts are set. The worker is a child that the kernel kills with
its actor, so it is the same process under every launcher and still cannot outlive the reservation of its GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from kog_dist.errors import AbortedError
from kog_dist.hardware.visible import VARIABLE
from kog_dist.launch import local
from kog_dist.launch.hosted_ranks import host_rank, knock
from kog_dist.launch.ray.devices import assigned_gpu
from kog_dist.launch.ray.host import HostArgs
from kog_dist.launch.ray.rendezvous import RayMeeting, RayRendezvous
from kog_dist.rpc.ray_engines import EngineOnRay
from kog_dist.runtime.launcher_file import LauncherFile
from kog_dist.runtime.process_page import ProcessPage
from kog_dist.runtime.wait import Deadline
from kog_dist.system.python_child import harden

_MARGIN_S = 10.0  # for Ray to carry an answer that is due


class EngineHost:
    """Starts the engine's host process, hands its reports to the driver, and is where rank actors meet. On one event loop."""

    def __init__(self, world_size: int, launcher: LauncherFile, launcher_node: str) -> None:
        harden()
        _exit_with_raylet()
        self._launcher, self._launcher_node = launcher, launcher_node
        self._log_dir: Path | None = None
        self._meeting = RayMeeting(world_size)
        self._child: local.Child | None = None
        self._page: ProcessPage | None = None
        self._reports: list[str] = []
        self._partial = b""
        self._news = asyncio.Condition()
        self._door: asyncio.Future[str] | None = None

    async def gather(self, round_number: int, rank: int, payload: bytes, timeout_s: float) -> list[bytes | None] | None:
        """See `RayMeeting`."""
        return await self._meeting.gather(round_number, rank, payload, timeout_s)

    async def describe(self) -> EngineOnRay:
        """Where its launcher and its ranks are, for `kog-client stop` and `logs`."""
        import ray

        here = LauncherFile.of_this_process(self._launcher.instance, self._launcher.shutdown_timeout_s, self._log_dir)
        return EngineOnRay(self._launcher, self._launcher_node, here, ray.get_runtime_context().get_node_id())

    async def start(self, arguments: str, gpus: list[str]) -> None:
        """Start the host process with `HostArgs` as JSON; `gpus` are the UUIDs of the ranks' GPUs."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        environment = dict(os.environ) | ({VARIABLE: ",".join(gpus)} if gpus else {})
        self._page = ProcessPage.create()
        args = replace(HostArgs.from_json(arguments), report_fd=write_fd, page_fd=self._page.fd)
        self._log_dir = None if args.settings["log_dir"] is None else Path(args.settings["log_dir"])
        try:
            child = local.spawn(
                "engine host",
                "kog_dist.launch.ray.host",
                [args.to_json()],
                environment=environment,
                pass_fds=(write_fd, self._page.fd),
            )
        finally:
            os.close(write_fd)
        os.set_blocking(read_fd, False)
        self._child = child
        asyncio.get_running_loop().add_reader(read_fd, self._read_reports, read_fd)

    async def door(self) -> str:
        """Where rank actors report to the host process, as soon as it listens."""
        seen = 0
        while True:
            for report in map(json.loads, await self.reports(seen)):
                seen += 1
                if report["kind"] == "open":
                    return str(report["door"])
                if report["kind"] in ("ended", "gone"):
                    raise AbortedError("the engine ended before it wanted its ranks")

    async def reports(self, seen: int) -> list[str]:
        """What the host process has reported, without the first `seen`; waits until there is something."""
        async with self._news:
            await self._news.wait_for(lambda: len(self._reports) > seen)
            return self._reports[seen:]

    async def signal(self, signum: int) -> None:
        """Signal the host process, which answers as the launcher of a plain engine does."""
        if self._child is not None and self._page is not None:
            self._page.ask_to_stop()
            self._child.send(signum)

    def _read_reports(self, fd: int) -> None:
        chunk = os.read(fd, 1 << 16)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        found = [line.decode() for line in lines]
        if not chunk:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)
            found.append(json.dumps(self._how_it_went()))
            self._meeting.stop()
        task = asyncio.ensure_future(self._publish(found))
        task.add_done_callback(lambda done: done.result())

    async def _publish(self, lines: list[str]) -> None:
        async with self._news:
            self._reports += lines
            self._news.notify_all()

    def _how_it_went(self) -> dict[str, object]:
        """The last report: the process is gone."""
        child = self._child
        assert child is not None
        select.select([child.ended_fd], [], [], _MARGIN_S)
        child.read_output()
        return {"kind": "gone", "pid": child.pid, "exit_code": child.exit_code, "last_line": child.last_line()}


class RankActor:
    """Holds one rank's share of the node and runs its worker. Its one task lasts as long as the engine."""

    def __init__(self) -> None:
        harden()
        _exit_with_raylet()

    def run(self, rank: int, world_size: int, host: Any, arguments: str, uses_gpu: bool, timeout_s: float) -> None:
        """Meet the other ranks, let rank 0 start the engine, then run the worker until the engine has ended."""
        import ray

        deadline = Deadline.after(timeout_s)

        def ask(round_number: int, rank: int, payload: bytes, limit_s: float) -> list[bytes | None] | None:
            answer = host.gather.remote(round_number, rank, payload, limit_s)
            found: list[bytes | None] | None = ray.get(answer, timeout=limit_s + _MARGIN_S)
            return found

        own = assigned_gpu(ray.get_runtime_context().get_accelerator_ids()["GPU"], os.environ) if uses_gpu else ""
        gpus = [raw.decode() for raw in RayRendezvous(rank, world_size, ask).all_gather_bytes(own.encode(), deadline)]
        if rank == 0:
            ray.get(host.start.remote(arguments, gpus if uses_gpu else []), timeout=_MARGIN_S)
        door = ray.get(host.door.remote(), timeout=deadline.remaining_s() + _MARGIN_S)
        with knock(door, rank) as connection:
            host_rank(connection, ())


def _exit_with_raylet() -> None:
    """End this process at once when the raylet dies. Ray's own check was seen to leave actors alive for more than 20 s."""
    raylet = os.pidfd_open(os.getppid())

    def watch() -> None:
        select.select([raylet], [], [])
        os.kill(os.getpid(), signal.SIGKILL)  # and the kernel kills the child with it

    threading.Thread(target=watch, name="raylet watch", daemon=True).start()
