"""Shapes that benchmarks of GPUs know by name, and checkpoints of them with random weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec, laneformer_2b

SPECS = {"2b": laneformer_2b}
SEED = 1
_TMPFS = Path("/dev/shm")


def named_spec(name: str, *, others: Sequence[str] = ()) -> ModelSpec:
    """The spec of a name. Raises ConfigError listing the known ones, and `others` that the caller knows."""
    if name not in SPECS:
        raise ConfigError(f"--spec {name!r} is not known; known: {', '.join((*others, *SPECS))}")
    return SPECS[name]()


@contextmanager
def random_checkpoint(spec: ModelSpec, parent: Path | None) -> Iterator[Path]:
    """A folder with a bfloat16 checkpoint and its manifest, made on the GPU; removed at the end.

    It lies in `parent`; None: in memory (/dev/shm) if there is room, else where temporary files go.
    """
    from kog_dist.model.checkpoint import write_stored_checkpoint
    from kog_dist.workers.cuda.device_weights import random_tensor

    with model_folder(spec, parent) as folder:
        write_stored_checkpoint(folder, spec, lambda tensor: random_tensor(spec, tensor, SEED).get(), max_shard_bytes=2**30)
        yield folder


@contextmanager
def model_folder(spec: ModelSpec, parent: Path | None = None) -> Iterator[Path]:
    """An empty folder with room for a 16-bit checkpoint of `spec`, removed at the end; `parent` as above."""
    num_bytes = 2 * spec.num_parameters + 2**28
    if parent is None and _TMPFS.is_dir() and shutil.disk_usage(_TMPFS).free > num_bytes:
        parent = _TMPFS
    with tempfile.TemporaryDirectory(prefix="kog-model-", dir=parent) as name:
        free = shutil.disk_usage(name).free
        if free < num_bytes:
            raise ConfigError(f"{name} has room for {free / 1e9:.1f} GB, the model needs {num_bytes / 1e9:.1f} GB; give --folder")
        yield Path(name)
