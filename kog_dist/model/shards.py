"""The files with the weights of a model folder: one of safetensors, those that an index names, or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.model.gguf.folder import open_weights
from kog_dist.model.hub_cache import check_inside, download_again
from kog_dist.model.limits import MAX_SHARDS, MAX_TENSORS
from kog_dist.model.manifest import Manifest, read_json
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.quoting import short

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def open_shards(folder: Path, manifest: Manifest | None) -> tuple[tuple[SafetensorsFile, ...], dict[str, SafetensorsFile]]:
    """The files of a folder that have its weights, and by tensor name the file that holds it. Raises CheckpointError."""
    if (gguf := open_weights(folder)) is not None:
        return (gguf,), dict.fromkeys(gguf.tensors, gguf)
    weight_map = _read_index(folder, manifest)
    names = [SINGLE_NAME] if weight_map is None else sorted(set(weight_map.values()))
    files: dict[str, SafetensorsFile] = {}
    for file_name in names:
        path = folder / file_name
        check_inside(folder, path)
        if not os.path.exists(path):
            raise CheckpointError(_missing_file(folder, file_name, weight_map))
        files[file_name] = SafetensorsFile.open(path)
    owner = {name: file for file in files.values() for name in file.tensors}
    for file_name, file in files.items():
        promised = set(file.tensors) if weight_map is None else {name for name, place in weight_map.items() if place == file_name}
        for name in sorted(promised - set(file.tensors)):
            raise CheckpointError(f"{file.path} has no tensor {short(name)}, but {INDEX_NAME} says so")
        for name in sorted(set(file.tensors) - promised):
            raise CheckpointError(f"{file.path} has a tensor {short(name)} that {INDEX_NAME} does not place there")
    return tuple(files.values()), owner


def _missing_file(folder: Path, file_name: str, weight_map: Mapping[str, str] | None) -> str:
    if weight_map is not None:
        num_tensors = sum(place == file_name for place in weight_map.values())
        return f"{folder / file_name} is missing: {INDEX_NAME} places {num_tensors} tensors in it; {download_again(folder)}"
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    seen = f"; it has {', '.join(map(short, found[:4]))}" if found else ""
    return f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{seen}; weights must be in safetensors files with an index"


def _read_index(folder: Path, manifest: Manifest | None) -> dict[str, str] | None:
    """Tensor name -> file name, or None if the folder has no index."""
    parsed = read_json(folder, INDEX_NAME, manifest)
    if parsed is None:
        return None
    path, weight_map = folder / INDEX_NAME, parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or set(parsed) - {"metadata", "weight_map"}:
        raise CheckpointError(
            f"{path} is not an index of safetensors files: expected metadata and a weight_map that is not empty"
        )
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{path} places {len(weight_map)} tensors, at most {MAX_TENSORS} are accepted")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path} places tensor {short(name)} in {short(file_name)}, not a .safetensors file of the folder"
            )
        if "\0" in file_name or len(file_name) > 255:
            raise CheckpointError(f"{path} places tensor {short(name)} in {short(file_name)}, which is no file name")
    if (num_shards := len(set(weight_map.values()))) > MAX_SHARDS:
        raise CheckpointError(f"{path} names {num_shards} files, at most {MAX_SHARDS} are accepted")
    return weight_map
