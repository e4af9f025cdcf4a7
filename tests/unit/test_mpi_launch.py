"""What the MPI launcher decides without MPI: pair, gang, lifelines; the bound of MPI_Init; the text of start-up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError, KogError, LaunchError
from kog_dist.launch.mpi.launch import Identity, check_gang
from kog_dist.launch.mpi.pair import check_flavour, check_world_size, library_name
from kog_dist.launch.mpi.starter import starter_lifelines
from kog_dist.runtime.rank_env import RankVariables

OPEN_MPI = RankVariables("Open MPI", 1, 4, 1)
MPICH = RankVariables("MPICH", 1, 4, 1)
SLURM = RankVariables("Slurm", 1, 4, None)
ME = Identity("node-a", "boot-a", "pid:[1] net:[2]", 1000, {**asdict(LaunchConfig()), "prompt": None}, "door")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", "MPICH 5.0.2"),
        ("Open MPI v4.1.6, package: Debian OpenMPI, ident: 4.1.6\0", "Open MPI 4.1.6"),
        ("Intel(R) MPI Library 2021.11 for Linux* OS\n", "Intel(R) MPI Library 2021.11 for Linux* OS"),
        ("MVAPICH2 Version      :\t2.3.7\n", "MVAPICH2 2.3.7"),
        ("", "an unknown MPI"),
    ],
)
def test_name_of_the_library(text: str, name: str) -> None:
    assert library_name(text) == name


def test_open_mpi_and_another_library_do_not_go_together() -> None:
    with pytest.raises(
        LaunchError, match=r"Open MPI started 4 processes, but mpi4py uses MPICH 5\.0\.2, another MPI; start with"
    ):
        check_flavour(OPEN_MPI, "MPICH 5.0.2")
    for found, library in ((OPEN_MPI, "Open MPI 4.1.6"), (MPICH, "MPICH 5.0.2"), (MPICH, "Open MPI 4.1.6"), (None, "MPICH 5")):
        check_flavour(found, library)


@pytest.mark.parametrize(
    ("found", "world_size", "message"),
    [
        (MPICH, 4, ""),
        (None, 4, ""),
        (None, 1, "no mpirun has started this process"),
        (MPICH, 1, "MPICH started 4 processes, but mpi4py uses Open MPI 5.0.11, which knows of 1 only; start with the mpirun"),
        (SLURM, 1, "start with srun --mpi=pmi2"),
        (OPEN_MPI, 2, "which knows of 2 only"),
    ],
)
def test_number_of_processes_must_be_the_same(found: RankVariables | None, world_size: int, message: str) -> None:
    if not message:
        check_world_size(found, "Open MPI 5.0.11", world_size)
        return
    with pytest.raises(LaunchError) as caught:
        check_world_size(found, "Open MPI 5.0.11", world_size)
    assert message in str(caught.value)


def test_gang_of_equals_gets_its_size() -> None:
    assert check_gang([ME, replace(ME, door=None)], LaunchConfig()) == LaunchConfig(ranks=2)
    assert check_gang([ME, ME], LaunchConfig(ranks=2)).ranks == 2


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"host": "node-b", "boot_id": "boot-b"}, LaunchError, "rank 1 is on host node-b, rank 0 on node-a: an engine's ranks"),
        ({"namespaces": "pid:[3] net:[2]"}, LaunchError, "rank 1 and rank 0 are in different containers"),
        ({"uid": 0}, LaunchError, "rank 1 belongs to user 0, rank 0 to user 1000"),
        ({"settings": {**ME.settings, "model": "/other"}}, ConfigError, "rank 1 was started with another MODEL than rank 0"),
        ({"settings": {**ME.settings, "rpc_port": 1}}, ConfigError, "rank 1 was started with another --rpc-port than rank 0"),
        ({"settings": {**ME.settings, "prompt": {}}}, ConfigError, "rank 1 was started with another prompt than rank 0"),
    ],
)
def test_gang_that_makes_no_engine_is_refused(change: Mapping[str, Any], kind: type[KogError], message: str) -> None:
    with pytest.raises(kind) as caught:
        check_gang([ME, replace(ME, **change)], LaunchConfig())
    assert message in str(caught.value)


def test_rank_count_that_contradicts_mpirun_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ranks 4 contradicts mpirun -n 2"):
        check_gang([ME, ME], LaunchConfig(ranks=4))


def test_lifelines_reach_past_a_shell_to_the_one_that_set_the_variables() -> None:
    program = (
        "import os\n"
        "from kog_dist.launch.mpi.starter import starter_lifelines\n"
        "from kog_dist.runtime.rank_env import read_rank_variables\n"
        "found = read_rank_variables(os.environ)\n"
        "print(os.getppid(), list(starter_lifelines(found).values()))\n"
    )
    environment = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "2"}
    command = ["sh", "-c", '"$0" -c "$1"; true', sys.executable, program]  # `true`: or the shell would become Python
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    shell_pid, _, names = done.stdout.strip().partition(" ")
    me = f"(pid {os.getpid()})"
    assert names.count("(pid ") == 2
    assert f"'sh (pid {shell_pid})'" in names
    assert names.endswith(f"{me}']")


def test_lifeline_is_readable_once_its_process_has_ended() -> None:
    (pidfd, name), *_ = starter_lifelines(MPICH).items()  # this process is no rank: its parent is the first and only one
    assert name.endswith(f"(pid {os.getppid()})")
    assert select.select([pidfd], [], [], 0) == ([], [], [])
    os.close(pidfd)


@pytest.mark.parametrize(("speaks", "said"), [(True, "the MPI processes did not meet in time"), (False, "")])
def test_watchdog_ends_a_process_that_python_cannot_wake(speaks: bool, said: str) -> None:
    program = (
        "import ctypes\n"
        "from kog_dist.launch.mpi.watchdog import Watchdog\n"
        f"Watchdog.start(60.0, speaks=True).dismiss()\n"
        f"Watchdog.start(0.2, speaks={speaks})\n"
        "ctypes.PyDLL(None).sleep(60)\n"  # holds the interpreter's lock, as MPI_Init does
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    assert said in done.stderr
    assert bool(done.stderr) == speaks
