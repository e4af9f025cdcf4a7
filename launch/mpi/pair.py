"""Whether mpirun and mpi4py belong together, and what to say when they do not.

The mpirun of one MPI with the mpi4py of another starts N processes each of which believes to be alone, without any error.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from kog_dist.errors import LaunchError
from kog_dist.runtime.rank_env import RankVariables

OPEN_MPI = "Open MPI"


def library_name(version_text: str) -> str:
    """`MPICH 5.0.2` or `Open MPI 4.1.6`, from what MPI_Get_library_version says."""
    first = " ".join(version_text.split("\n", 1)[0].split(",", 1)[0].split())
    first = re.sub(r" ?version ?:? ", " ", first, flags=re.IGNORECASE)
    return re.sub(r"\bv(?=\d)", "", first).strip() or "an unknown MPI"


def check_flavour(found: RankVariables | None, library: str) -> None:
    """Before MPI_Init, which would end this process without a reason: LaunchError when Open MPI meets another MPI.

    MPICH's variables say less, for Slurm sets them too, whatever MPI the program has.
    """
    if found is not None and found.source == OPEN_MPI and not library.startswith(OPEN_MPI):
        raise LaunchError(_sentence(found, f"{library}, another MPI"))


def check_world_size(found: RankVariables | None, library: str, world_size: int) -> None:
    """After MPI_Init: LaunchError when MPI has found another number of processes than have been started."""
    if found is None and world_size == 1:
        raise LaunchError("--launcher mpi: no mpirun has started this process; start it as mpirun -n 4 kog-launch")
    if found is not None and found.world_size != world_size:
        raise LaunchError(_sentence(found, f"{library}, which knows of {world_size} only"))


def _sentence(found: RankVariables, library: str) -> str:
    return f"{found.source} started {found.world_size} processes, but mpi4py uses {library}; {_remedy(found, library)}"


def _remedy(found: RankVariables, library: str) -> str:
    if found.source == "Slurm":
        return "start with srun --mpi=pmi2 or another entry of srun --mpi=list, or with mpirun inside the allocation"
    own = Path(sys.executable).parent / "mpirun"
    if own.exists() and shutil.which("mpirun") != str(own):
        return f"start with the mpirun that belongs to it: {own} -n {found.world_size} kog-launch"
    return f"start with the mpirun of that MPI, or install mpi4py for {found.source}: pip install --no-binary mpi4py mpi4py"
