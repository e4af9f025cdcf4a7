"""Run the bodies of a rendezvous on the ranks that mpirun has started: `mpirun -n 3 python -m tests.multi.rendezvous_mpi`."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any

import mpi4py

from kog_dist.runtime.mpi_rendezvous import MpiRendezvous
from tests.multi import rendezvous_bodies


def join(comm: Any, aborted: Callable[[], bool]) -> MpiRendezvous:
    return MpiRendezvous(comm, aborted=aborted)


def main() -> None:
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init()
    comms = [MPI.COMM_WORLD.Dup() for _ in rendezvous_bodies.BODIES]
    try:
        for comm, body in zip(comms, rendezvous_bodies.BODIES, strict=True):
            body(functools.partial(join, comm))
            print(body.__name__, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
    MPI.Finalize()


main()
