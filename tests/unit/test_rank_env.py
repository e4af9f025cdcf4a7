"""Rank variables of the programs that start ranks, and what `--launcher auto` makes of them."""

from __future__ import annotations

import pytest

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.launch.choice import choose_launcher
from kog_dist.runtime.rank_env import RankVariables, read_rank_variables

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "PMIX_RANK": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "6"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
SRUN_PMI2 = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "12"}
SALLOC = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8"}
SBATCH = {**SALLOC, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN_SHELL = {**SBATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}  # srun --pty bash, and salloc's interactive step
CONTAINER = {"RANK": "0", "WORLD_SIZE": "2"}  # a job system's numbers of containers


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, RankVariables("torchrun", 5, 8, 1)),
        (OPEN_MPI, RankVariables("Open MPI", 2, 4, 2)),
        (MPICH, RankVariables("MPICH", 1, 4, 1)),
        (SRUN, RankVariables("Slurm", 3, 4, 0)),
        (SRUN_PMI2, RankVariables("MPICH", 3, 4, None)),
        (SALLOC, None),
        (SBATCH, None),
        (SRUN_SHELL, RankVariables("Slurm", 0, 1, 0)),
        (CONTAINER, None),
        ({**CONTAINER, **OPEN_MPI}, RankVariables("Open MPI", 2, 4, 2)),
        ({**SALLOC, **MPICH}, RankVariables("MPICH", 1, 4, 1)),
        ({**MPICH, "PMI_SIZE": ""}, None),
    ],
)
def test_who_started_this_process(environ: dict[str, str], expected: RankVariables | None) -> None:
    assert read_rank_variables(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_SIZE": "4"}, "PMI_RANK is not set, expected a number from 0 to 3 as MPICH sets it"),
        ({"PMI_SIZE": "4", "PMI_RANK": "4"}, "PMI_RANK is '4', expected a number from 0 to 3"),
        ({"PMI_SIZE": "0", "PMI_RANK": "0"}, "PMI_SIZE is '0', expected a number from 1 to 1000000"),
        ({"PMI_SIZE": "-1", "PMI_RANK": "0"}, "PMI_SIZE is '-1'"),
        ({"PMI_SIZE": "9" * 5000, "PMI_RANK": "0"}, "PMI_SIZE is '999"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "four"}, "OMPI_COMM_WORLD_SIZE is 'four'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "²"}, "OMPI_COMM_WORLD_LOCAL_RANK is '²'"),
        ({**SRUN, "SLURM_PROCID": " 1"}, "SLURM_PROCID is ' 1'"),
        ({**TORCHRUN, "RANK": "8"}, "RANK is '8', expected a number from 0 to 7 as torchrun sets it; unset WORLD_SIZE"),
    ],
)
def test_nonsense_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rank_variables(environ)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("auto", {}, "local"),
        ("auto", OPEN_MPI, "mpi"),
        ("auto", MPICH, "mpi"),
        ("auto", SRUN, "mpi"),
        ("auto", SALLOC, "local"),
        ("auto", SBATCH, "local"),
        ("auto", SRUN_SHELL, "local"),
        ("auto", CONTAINER, "local"),
        ("auto", {"PMI_SIZE": "1", "PMI_RANK": "0"}, "local"),
        ("auto", {"RAY_ADDRESS": "127.0.0.1:6379"}, "ray"),
        ("auto", {"RAY_ADDRESS": "127.0.0.1:6379", **MPICH}, "mpi"),
        ("local", MPICH, "local"),
        ("local", TORCHRUN, "local"),
        ("mpi", {}, "mpi"),
        ("ray", MPICH, "ray"),
    ],
)
def test_choice_of_the_launcher(launcher: str, environ: dict[str, str], expected: str) -> None:
    choice = choose_launcher(LaunchConfig(launcher=launcher), environ)
    assert choice.launcher == expected
    assert choice.reason


def test_torchrun_is_told_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"rank 5 of 8.*start kog-launch --ranks 8 by itself, or mpirun -n 8 kog-launch"):
        choose_launcher(LaunchConfig(), TORCHRUN)


def test_replicas_do_not_go_with_mpi() -> None:
    assert choose_launcher(LaunchConfig(replicas=2), {}).launcher == "local"
    with pytest.raises(ConfigError, match=r"--replicas 2 does not go with MPI \(one of 4 processes started by MPICH\)"):
        choose_launcher(LaunchConfig(replicas=2), MPICH)
