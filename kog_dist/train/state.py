"""A training run on disk: tensors in safetensors files of bounded size and a JSON file; no pickle.

Each save is a new generation of files; progress.json names the one that counts and is replaced last, in one step. Whenever the
process is killed, the folder holds a whole state.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.system.files import write_at_once

_MAX_FILE_BYTES = 15 * 2**20
_PROGRESS = "progress.json"


def make_folder(folder: Path) -> None:
    """Make the folder of a state, before hours are spent on what is to be saved there. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"the state folder {folder} cannot be written: {error.strerror}; choose another") from None


def save_state(folder: Path, progress: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Replace the state in `folder`: JSON, and named tensors under each stem, in files of at most 15 MiB (or one tensor)."""
    folder.mkdir(parents=True, exist_ok=True)
    old = load_progress(folder)
    generation = (old["generation"] if old else 0) + 1
    for stem, named in tensors.items():
        for shard_idx, shard in enumerate(_shards(named)):
            save_file(shard, folder / f"{stem}-{generation}-{shard_idx:03d}.safetensors")
    write_json(folder / _PROGRESS, {**progress, "generation": generation})
    for stem in tensors:
        for file in folder.glob(f"{stem}-*.safetensors"):
            if not file.name.startswith(f"{stem}-{generation}-"):
                file.unlink()


def load_tensors(folder: Path, stem: str) -> dict[str, Tensor]:
    """All tensors that were saved under `stem`. Raises CheckpointError if there are none."""
    progress = load_progress(folder)
    files = sorted(folder.glob(f"{stem}-{progress['generation']}-*.safetensors")) if progress else []
    if not files:
        raise CheckpointError(f"{folder} holds no {stem} of a training run; run `python -m kog_dist.train run` first")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load_progress(folder: Path) -> dict[str, Any] | None:
    """The JSON part of a state, or None if no run has been saved in `folder`. Raises CheckpointError if it cannot be read."""
    path = folder / _PROGRESS
    try:
        progress: dict[str, object] = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path} is no training state: {error}; use another folder") from None
    if not isinstance(progress.get("generation"), int):
        raise CheckpointError(f"{path} names no generation of files; it was written by an older version, use another folder")
    return progress


def write_json(path: Path, content: object) -> None:
    """Write a file whole or not at all, with its folders. Of several writers the last one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_at_once(path, json.dumps(content, indent=1).encode() + b"\n")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = _MAX_FILE_BYTES
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes > room and shards[-1]:
            shards.append({})
            room = _MAX_FILE_BYTES
        shards[-1][name] = tensor.detach().cpu().contiguous()
        room -= num_bytes
    return shards
