"""Which rank of how many this process is, as the program that started it says in environment variables."""

from __future__ import annotations

from collections.abc import Mapping

from kog_dist.errors import ConfigError
from kog_dist.records import dataclass

_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class RankVariables:
    """The rank variables of one program. `local_rank` is None where the program does not say it."""

    source: str  # "torchrun", "Open MPI", "MPICH" or "Slurm"
    rank: int
    world_size: int
    local_rank: int | None


@dataclass(frozen=True, slots=True)
class _Names:
    source: str
    rank: str
    world_size: str
    local_rank: str
    telling: tuple[str, ...]  # the group counts only where all of these are set


# Slurm's own: in a batch script and in the shell of salloc SLURM_NTASKS is the allocation's size, and one process
# runs. Only in a step, under srun, SLURM_STEP_NUM_TASKS says how many processes there are.
# torchrun's own: job systems set RANK and WORLD_SIZE for a whole container; LOCAL_RANK comes from torchrun alone.
_GROUPS = (
    _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    _Names("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    _Names("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("PMI_SIZE",)),  # and Intel MPI, and srun --mpi=pmi2
    _Names("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ("SLURM_STEP_NUM_TASKS",)),
)


def read_rank_variables(environ: Mapping[str, str]) -> RankVariables | None:
    """What the first program that is found says: torchrun, Open MPI, MPICH, Slurm; None when nobody says anything.

    Raises ConfigError naming the variable that is missing or makes no sense.
    """
    for names in _GROUPS:
        if all(environ.get(name) for name in names.telling):
            return _read(names, environ)
    return None


def _read(names: _Names, environ: Mapping[str, str]) -> RankVariables:
    world_size = _number(names, names.world_size, environ, 1, _MOST_RANKS)
    rank = _number(names, names.rank, environ, 0, world_size - 1)
    local_rank = _number(names, names.local_rank, environ, 0, world_size - 1) if environ.get(names.local_rank) else None
    return RankVariables(names.source, rank, world_size, local_rank)


def _number(names: _Names, variable: str, environ: Mapping[str, str], least: int, most: int) -> int:
    text = environ.get(variable, "")
    if text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_RANKS)) and least <= int(text) <= most:
        return int(text)
    seen = f"is {text!r}" if text else "is not set"
    raise ConfigError(
        f"{variable} {seen}, expected a number from {least} to {most} as {names.source} sets it; unset {names.world_size}, or "
        f"start with {names.source} or with --launcher local"
    )
