"""Every rendezvous keeps the same promises: local ranks as threads, MPI ranks as the processes of an mpirun,
Ray ranks as threads that meet on an event loop (through Ray itself they meet in tests/e2e/test_ray.py)."""

from __future__ import annotations

import asyncio
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kog_dist.launch.ray.rendezvous import RayMeeting, RayRendezvous
from kog_dist.runtime.memfd import Segment
from kog_dist.runtime.topology import LocalRendezvous
from tests.multi.mpi_command import FLAVOURS, mpirun_or_skip
from tests.multi.rendezvous_bodies import BODIES, NUM_RANKS, Body

ROOT = Path(__file__).parents[2]


def join(meeting: Segment, rank: int, aborted: Callable[[], bool]) -> LocalRendezvous:
    return LocalRendezvous.from_fd(os.dup(meeting.fd), rank, aborted=aborted)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_local_ranks(body: Body) -> None:
    meeting = LocalRendezvous.create(NUM_RANKS, max_payload_bytes=64)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        ranks = [pool.submit(body, functools.partial(join, meeting, rank)) for rank in range(NUM_RANKS)]
        for rank in ranks:
            rank.result(timeout=60)
    meeting.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_mpi_ranks(flavour: str) -> None:
    command = [*mpirun_or_skip(flavour, NUM_RANKS), sys.executable, "-m", "tests.multi.rendezvous_mpi"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(body.__name__) for body in BODIES] == [NUM_RANKS] * len(BODIES)  # mpirun mixes their lines


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_ray_ranks(body: Body) -> None:
    loop, meeting = asyncio.new_event_loop(), RayMeeting(NUM_RANKS)
    host = threading.Thread(target=loop.run_forever)
    host.start()

    def ask(round_number: int, rank: int, payload: bytes, limit_s: float) -> list[bytes | None] | None:
        gathering = meeting.gather(round_number, rank, payload, limit_s)
        return asyncio.run_coroutine_threadsafe(gathering, loop).result(timeout=60)

    def join_ray(rank: int, aborted: Callable[[], bool]) -> RayRendezvous:
        return RayRendezvous(rank, NUM_RANKS, ask, aborted=aborted)

    try:
        with ThreadPoolExecutor(NUM_RANKS) as pool:
            ranks = [pool.submit(body, functools.partial(join_ray, rank)) for rank in range(NUM_RANKS)]
            for rank in ranks:
                rank.result(timeout=60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        host.join(60)
        loop.close()


def test_ray_ranks_whose_host_stops() -> None:
    async def gather_and_stop() -> tuple[list[bytes | None] | None, list[bytes | None] | None]:
        meeting = RayMeeting(2)
        waiting = asyncio.create_task(meeting.gather(1, 0, b"early", 60.0))
        await asyncio.sleep(0)
        meeting.stop()
        return await waiting, await meeting.gather(1, 1, b"late", 60.0)

    assert asyncio.run(gather_and_stop()) == (None, None)
