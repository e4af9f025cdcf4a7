"""What a configuration asks to start: which model, on what, in how many ranks. Decided before anything is created."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError, LaunchError

if TYPE_CHECKING:
    from kog_dist.model.checkpoint import Checkpoint


@dataclass(frozen=True)
class Target:
    """A model whose metadata is in order, and the ranks that will run it."""

    folder: Path
    model_name: str
    checkpoint: Checkpoint
    world_size: int
    device: str


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
    from kog_dist.model.checkpoint import open_checkpoint

    if settings.device == "cuda" or settings.gpus is not None:
        raise LaunchError("this version runs on CPU ranks only: the CUDA engine is not part of it; use --device cpu")
    folder, name = model_folder(settings)
    checkpoint = open_checkpoint(folder, verify=settings.verify)
    spec = checkpoint.spec
    world_size = settings.ranks or _ranks_for(spec.num_lanes)
    spec.lanes_of_rank(0, world_size)
    return Target(folder, name, checkpoint, world_size, "cpu")


def _ranks_for(num_lanes: int) -> int:
    """The largest rank count that divides the lanes and gives every rank a core."""
    num_cores = len(os.sched_getaffinity(0))
    return max(n for n in range(1, num_lanes + 1) if num_lanes % n == 0 and n <= max(num_cores, 1))
