"""Every rendezvous keeps the same promises: local ranks as threads, MPI ranks as the processes of an mpirun."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kog_dist.memfd import Segment
from kog_dist.topology import LocalRendezvous
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
