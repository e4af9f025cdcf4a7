"""What a configuration asks to start: which model, on what, in how many ranks. Decided before anything is created."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from kog_dist.config import LaunchConfig
from kog_dist.errors import CheckpointError, ConfigError, LaunchError

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
    gpus: tuple[int, ...] = ()  # GPU of every rank

    def rank_device(self, rank: int) -> str:
        """Device of a rank as its worker is told: `cpu` or `cuda:INDEX`."""
        return f"cuda:{self.gpus[rank]}" if self.gpus else self.device


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

    folder, name = model_folder(settings)
    checkpoint = open_checkpoint(folder, verify=settings.verify)
    gpus = _gpus_for(settings)
    world_size = len(gpus) or settings.ranks or _ranks_for(checkpoint.spec.num_lanes)
    checkpoint.spec.lanes_of_rank(0, world_size)
    if not gpus:
        kv_dtype = "float32" if settings.kv_dtype == "auto" else settings.kv_dtype
        return Target(folder, name, checkpoint, world_size, "cpu", kv_dtype)
    if settings.ranks not in (0, len(gpus)):
        raise ConfigError(f"--ranks {settings.ranks} contradicts {len(gpus)} GPUs: a GPU has one rank")
    if world_size > 1:
        raise LaunchError(f"this version decodes on one GPU, not on {world_size}; use --gpus 1, or --device cpu")
    kv_dtype = checkpoint.dtype if settings.kv_dtype == "auto" else settings.kv_dtype
    _check_kernel(checkpoint, kv_dtype)
    return Target(folder, name, checkpoint, world_size, "cuda", kv_dtype, gpus)


def _check_kernel(checkpoint: Checkpoint, kv_dtype: str) -> None:
    """Raises ConfigError naming what the monokernel cannot run."""
    from kog_dist.workers.cuda.kernel_shape import KernelShape

    KernelShape(checkpoint.spec, checkpoint.spec.lanes_of_rank(0, 1), weight_dtype=checkpoint.dtype, kv_dtype=kv_dtype)


def _gpus_for(settings: LaunchConfig) -> tuple[int, ...]:
    """GPUs that are asked for, by index; empty for CPU ranks. No GPU is used unasked: see docs/monokernel.md, Status."""
    if settings.device != "cuda" and settings.gpus is None:
        return ()
    num_present = num_gpus()
    if settings.gpus is None:
        if not num_present:
            raise LaunchError("--device cuda: no NVIDIA driver or no GPU was found; use --device cpu")
        return (0,)
    text = settings.gpus.strip()
    try:
        wanted = tuple(range(num_present)) if text == "all" else _gpu_list(text)
    except ValueError:
        raise ConfigError(f"--gpus must be a count, a list such as 0,2,3, or all; got {settings.gpus!r}") from None
    missing = [gpu for gpu in wanted if gpu >= num_present]
    if missing or not wanted:
        found = f"{num_present} GPU{'s' if num_present != 1 else ''}" if num_present else "no NVIDIA driver or no GPU"
        raise LaunchError(f"--gpus {settings.gpus}: {found} was found on this machine; use --device cpu for CPU ranks")
    return wanted


def _gpu_list(text: str) -> tuple[int, ...]:
    """`2` is the first two, `0,2` or `2,` names them. Raises ValueError."""
    if text.isdecimal():
        return tuple(range(int(text)))
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ValueError(text)
    numbers = tuple(map(int, parts))
    if len(set(numbers)) != len(numbers):
        raise ValueError(text)
    return numbers


def num_gpus() -> int:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible, counted through NVML without touching them."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: no GPU for us either way
        return 0
    try:
        present = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([part for part in visible.split(",") if part.strip()]))


def _ranks_for(num_lanes: int) -> int:
    """The largest rank count that divides the lanes and gives every rank a core."""
    num_cores = len(os.sched_getaffinity(0))
    return max(n for n in range(1, num_lanes + 1) if num_lanes % n == 0 and n <= max(num_cores, 1))
