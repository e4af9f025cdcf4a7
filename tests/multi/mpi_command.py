"""The mpirun that belongs to the MPI library which mpi4py loads here, and how to call it in tests."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FLAVOURS = ("MPICH", "Open MPI")
# Open MPI pins each rank to a core, counts cores and refuses root; tests have few cores and may run in a container.
_FLAGS = {"MPICH": (), "Open MPI": ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe")}


@functools.cache
def library() -> str:
    """What mpi4py says of its library; empty where there is none. Asked in a process of its own."""
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def mpirun(flavour: str) -> tuple[str, ...] | None:
    """The command of this flavour's mpirun with the flags that tests need, None where mpi4py or mpirun is of another."""
    if not library().startswith(flavour):
        return None
    for folder in (str(Path(sys.executable).parent), None):
        command = shutil.which("mpirun", path=folder)
        if command is not None:
            version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
            if ("Open MPI" in version or "PRTE" in version) == (flavour == "Open MPI"):
                return (command, *_FLAGS[flavour])
    return None


def mpirun_or_skip(flavour: str, num_ranks: int) -> list[str]:
    """`mpirun -n num_ranks` of a flavour; skips the test where it is not there."""
    command = mpirun(flavour)
    if command is None:
        pytest.skip(f"no mpirun of {flavour} that fits to mpi4py here ({library().splitlines()[:1] or 'not installed'})")
    return [*command, "-n", str(num_ranks)]
