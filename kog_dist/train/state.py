"""A training run on disk: tensors in safetensors files of bounded size and a JSON file; no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kog_dist.errors import CheckpointError

_MAX_FILE_BYTES = 15 * 2**20


def save_tensors(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> None:
    """Write `stem-NNN.safetensors` files of at most 15 MiB (or one tensor); older files of the same stem are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{stem}-*.safetensors"):
        old.unlink()
    shards: list[dict[str, Tensor]] = [{}]
    room = _MAX_FILE_BYTES
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > room and shards[-1]:
            shards.append({})
            room = _MAX_FILE_BYTES
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= num_bytes
    for shard_idx, shard in enumerate(shards):
        save_file(shard, folder / f"{stem}-{shard_idx:03d}.safetensors")


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors of `stem-NNN.safetensors`. Raises CheckpointError if there are none."""
    files = sorted(folder.glob(f"{stem}-*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no {stem}-*.safetensors; run `python -m kog_dist.train run` first")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def save_progress(folder: Path, progress: Mapping[str, Any]) -> None:
    """Write the JSON part of a state; the last file of a save, so that its presence means the state is whole."""
    (folder / "progress.json").write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")


def load_progress(folder: Path) -> dict[str, Any] | None:
    """The JSON part of a state, or None if no run has been saved in `folder`."""
    path = folder / "progress.json"
    if not path.exists():
        return None
    progress: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return progress
