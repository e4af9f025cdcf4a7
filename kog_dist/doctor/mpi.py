"""Which MPI starts processes here, and which one mpi4py uses: they must be the same."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kog_dist.doctor.commands import output_of, python_output
from kog_dist.doctor.report import Finding, ok, problem, warning
from kog_dist.errors import ConfigError, install
from kog_dist.launch.mpi.pair import library_name
from kog_dist.runtime.rank_env import read_rank_variables

_LIBRARY_PROGRAM = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_INSTALL = install("mpi")


def mpi() -> Iterator[Finding]:
    """mpirun, mpi4py, and whether they are a pair."""
    started = _started_by()
    command = mpirun()
    if find_spec("mpi4py") is None:
        if started:
            yield problem(f"{started} has started this process, but mpi4py is missing; {_INSTALL}")
        elif command is not None:
            yield ok(f"{command} is here, mpi4py is not; where MPI is wanted, {_INSTALL}", mpirun=command)
        else:
            yield ok(f"no MPI, which only starts by mpirun need; where it is wanted, {_INSTALL}")
        return
    text = python_output(_LIBRARY_PROGRAM)
    if text is None:
        yield (problem if started else warning)(f"mpi4py cannot load an MPI library; install one that fits: {_INSTALL}")
        return
    library = library_name(text)
    details = {"library": library, "mpirun": command}
    if command is None:
        yield warning(f"mpi4py uses {library}, and there is no mpirun in PATH; install the one that belongs to it", **details)
        return
    flavour = starter_flavour(output_of(command, "--version") or "")
    details["flavour"] = flavour
    if flavour and flavour != _flavour_of(library):
        yield (problem if started else warning)(
            f"{command} belongs to {flavour}, but mpi4py uses {library}: it would start processes that each believe to be alone; "
            f"{_remedy(library)}",
            **details,
        )
    else:
        yield ok(f"{command} and mpi4py both use {library}", **details)


def mpirun() -> str | None:
    """The mpirun that a user would call; the one beside Python counts only where PATH has none."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


def starter_flavour(version_text: str) -> str:
    """`Open MPI` or `MPICH`, from what `mpirun --version` prints; empty for anything else."""
    if re.search(r"Open ?MPI|open-mpi|PRTE", version_text):
        return "Open MPI"
    return "MPICH" if re.search(r"HYDRA|MPICH|Intel\(R\) MPI", version_text) else ""


def _flavour_of(library: str) -> str:
    return "Open MPI" if library.startswith("Open MPI") else "MPICH"  # Intel's and others take MPICH's place, bit for bit


def _remedy(library: str) -> str:
    beside = Path(sys.executable).parent / "mpirun"
    if beside.exists() and shutil.which("mpirun") != str(beside):
        return f"call {beside} instead"
    return f"call the mpirun of {library}, or build mpi4py for the other: pip install --no-binary mpi4py mpi4py"


def _started_by() -> str:
    """The MPI launcher above this process, if there is one."""
    try:
        found = read_rank_variables(os.environ)
    except ConfigError:
        return ""
    return found.source if found is not None and found.source != "torchrun" and found.world_size > 1 else ""
