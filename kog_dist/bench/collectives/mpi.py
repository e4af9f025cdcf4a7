"""`kog-bench collectives` in processes that mpirun has started: one rank each, GPU by place on the machine, no supervisor.

Waits are bounded, but nobody watches for dead ranks here: MPI ends the others when one fails.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable

from kog_dist.collectives.ranks import RankContext
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.mpi_rendezvous import MpiRendezvous
from kog_dist.runtime.topology import RankInfo
from kog_dist.runtime.wait import Deadline


def in_mpi(body: Callable[[RankContext], object], arguments: dict[str, object], local_rank: int, deadline_s: float) -> object:
    """Run `body` as this process's rank; its result on rank 0, None on the others. Ends all processes when it raises."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, world_size = comm.Get_rank(), comm.Get_size()
    control = ControlPage.create(world_size, max_context=256)
    rendezvous = MpiRendezvous(comm.Dup(), aborted=control.aborted)
    info = RankInfo(rank, world_size, local_rank, "mpi")
    try:
        deadline = Deadline.after(deadline_s)
        result = body(RankContext(info, control, rendezvous, json.loads(json.dumps(arguments)), deadline, "cuda", local_rank))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
        raise
    return result if rank == 0 else None
