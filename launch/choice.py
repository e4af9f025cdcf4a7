"""Which launcher a run uses, and why: what `--launcher auto` means in this environment."""

from __future__ import annotations

from collections.abc import Mapping

from kog_dist.config import LaunchConfig
from kog_dist.errors import ConfigError
from kog_dist.records import dataclass
from kog_dist.runtime.rank_env import read_rank_variables


@dataclass(frozen=True, slots=True)
class Choice:
    """`launcher` is local, mpi or ray; `reason` says in a few words what decided it."""

    launcher: str
    reason: str


def choose_launcher(settings: LaunchConfig, environ: Mapping[str, str]) -> Choice:
    """The launcher that was asked for, or the one that fits to how this process was started.

    Raises ConfigError where none fits: under torchrun, which has no MPI to meet through, and for replicas under mpirun.
    """
    choice = _choose(settings, environ)
    if choice.launcher == "mpi" and settings.has_router:
        raise ConfigError(f"--replicas {settings.replicas} does not go with MPI ({choice.reason}): mpirun starts one engine")
    return choice


def _choose(settings: LaunchConfig, environ: Mapping[str, str]) -> Choice:
    if settings.launcher != "auto":
        return Choice(settings.launcher, f"--launcher {settings.launcher}")
    found = read_rank_variables(environ)
    if found is not None and found.world_size > 1:
        if found.source == "torchrun":
            raise ConfigError(
                f"torchrun started this process as rank {found.rank} of {found.world_size}, and torchrun has no MPI to meet "
                f"through; start kog-launch --ranks {found.world_size} by itself, or mpirun -n {found.world_size} kog-launch"
            )
        return Choice("mpi", f"one of {found.world_size} processes started by {found.source}")
    if settings.ray_address is not None or environ.get("RAY_ADDRESS"):
        return Choice("ray", "--ray-address is given" if settings.ray_address is not None else "RAY_ADDRESS is set")
    return Choice("local", "neither MPI nor Ray started this process")
