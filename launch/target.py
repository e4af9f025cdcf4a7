"""What a configuration asks to start: which model, on what, in how many ranks. Decided before anything is created."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError, ConfigError, KogError
from kog_dist.hardware.cpu_lists import format_cpu_list
from kog_dist.hardware.cpus import CpuMap, read_cpu_map, share_cpus
from kog_dist.hardware.gpus import Gpu
from kog_dist.hardware.placement import ANYWHERE, Placement
from kog_dist.launch.gpu_choice import GpuChoice, choose_gpus

CPU_KV_CACHES = 4  # unless told otherwise

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Target:
    """A model whose metadata is in order, and the ranks that will run it."""

    folder: Path
    model_name: str
    checkpoint: Checkpoint
    world_size: int
    device: str  # cpu or cuda
    kv_dtype: str
    gpus: tuple[Gpu, ...] = ()  # GPU of every rank; empty on CPU ranks, and in a plan for GPUs that are not here
    placements: tuple[Placement, ...] = ()  # of every rank; empty: the default
    num_kv_caches: int = 1  # of every rank
    prefill: str = "off"  # on, auto or off: whether GPUs take prompts in blocks
    note: str = ""  # for the launcher's log

    def rank_device(self, rank: int) -> str:
        """Device of a rank as its worker is told, which sees exactly the GPUs of its placement: `cpu` or `cuda:INDEX`."""
        return f"cuda:{rank}" if self.device == "cuda" else self.device

    def placement(self, rank: int) -> Placement:
        """Where the rank's process runs."""
        return self.placements[rank] if self.placements else ANYWHERE

    def place(self, rank: int) -> str:
        """The same for people: device and CPUs."""
        device = str(self.gpus[rank]) if self.gpus else "a GPU that is not here" if self.device == "cuda" else "cpu"
        cpus = self.placement(rank).cpus
        return f"{device}, pinned to CPUs {cpus}" if cpus else f"{device}, not pinned"


def model_folder(settings: LaunchConfig) -> tuple[Path, str]:
    """Folder and display name of the configured model. Raises CheckpointError when there is no such folder."""
    if settings.model is not None:
        folder = Path(settings.model)
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise CheckpointError(f"MODEL {folder} {what}; give the folder of a published checkpoint")
        return folder.resolve(), folder.resolve().name
    folder = Path(str(resources.files("kog_dist"))) / "models" / "demo"
    if not (folder / "config.json").is_file():
        raise CheckpointError("this installation has no bundled demo model; give MODEL, the folder of a published checkpoint")
    return folder, "demo"


def choose_target(settings: LaunchConfig) -> Target:
    """Open the checkpoint's metadata and fix device and world size. Raises ConfigError, CheckpointError or LaunchError."""
    target, obstacles = plan_target(settings)
    if obstacles:
        raise obstacles[0]
    return target


def plan_target(settings: LaunchConfig) -> tuple[Target, tuple[KogError, ...]]:
    """The same for GPUs that are not here or that this version cannot use: what would be started, and why it cannot be.

    Raises what is wrong with the configuration or the model wherever it is started.
    """
    from kog_dist.model.checkpoint import open_checkpoint

    folder, name = model_folder(settings)
    checkpoint = open_checkpoint(folder, verify=settings.verify)
    choice = choose_gpus(settings, checkpoint, os.environ)
    if choice is None:
        world_size = settings.ranks or _ranks_for(checkpoint.spec.num_lanes)
        checkpoint.spec.lanes_of_rank(0, world_size)
        kv_dtype = "float32" if settings.kv_dtype == "auto" else settings.kv_dtype
        return Target(
            folder, name, checkpoint, world_size, "cpu", kv_dtype, num_kv_caches=settings.kv_caches or CPU_KV_CACHES
        ), ()
    if settings.kv_caches > 1:
        raise ConfigError(f"kv_caches {settings.kv_caches} cannot be had on GPUs yet: the kernel has one KV cache; leave it out")
    target = Target(
        folder, name, checkpoint, choice.count, "cuda", choice.kv_dtype, choice.gpus, prefill=choice.prefill, note=choice.note
    )
    machine = read_cpu_map() if settings.pin else None
    return replace(target, placements=place_on_gpus(choice, machine)), choice.obstacles


def place_on_gpus(choice: GpuChoice, machine: CpuMap | None) -> tuple[Placement, ...]:
    """A placement for every chosen GPU; without `machine` nobody is pinned.

    A GPU's CPUs are its share among all GPUs of the machine, used or not: engines that know nothing of each other never
    meet on a core, and each rank of a job can work out its own.
    """
    uuids = tuple(gpu.uuid for gpu in choice.gpus)
    if machine is None:
        return tuple(Placement("", uuids) for _ in uuids)
    shares = share_cpus([gpu.cpus for gpu in choice.inventory.gpus], machine)
    by_uuid = dict(zip((gpu.uuid for gpu in choice.inventory.gpus), shares, strict=True))
    return tuple(Placement(format_cpu_list(by_uuid[uuid]), uuids) for uuid in uuids)


def _ranks_for(num_lanes: int) -> int:
    """The largest rank count that divides the lanes and gives every rank a core."""
    num_cores = len(os.sched_getaffinity(0))
    return max(n for n in range(1, num_lanes + 1) if num_lanes % n == 0 and n <= max(num_cores, 1))
