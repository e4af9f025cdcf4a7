"""The files with the weights of a model folder: one of safetensors, its parts, those that an index names, or a GGUF file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kog_dist.errors import CheckpointError
from kog_dist.model.gguf.folder import open_weights
from kog_dist.model.hub_cache import check_inside, download_again
from kog_dist.model.manifest import Manifest, read_json
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model_limits import MAX_INDEXED, MAX_SHARDS
from kog_dist.quoting import short

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PART = re.compile(r"(.{1,200})-[0-9]{5}-of-([0-9]{5})\.safetensors")


class Shards(NamedTuple):
    """The files that have a model's weights, and by tensor name the file that holds it. `note`: what they hold besides."""

    files: tuple[SafetensorsFile, ...]
    place: dict[str, SafetensorsFile]
    note: str = ""


def open_shards(folder: Path, manifest: Manifest | None) -> Shards:
    """The weights of a folder. Raises CheckpointError."""
    if ggufs := open_weights(folder):
        return Shards(ggufs, {name: file for file in ggufs for name in file.tensors})
    weight_map = _read_index(folder, manifest)
    names = shard_names(folder) if weight_map is None else sorted(set(weight_map.values()))
    files: dict[str, SafetensorsFile] = {}
    for file_name in names or [SINGLE_NAME]:
        path = folder / file_name
        check_inside(folder, path)
        if not os.path.exists(path):
            raise CheckpointError(_missing_file(folder, file_name, weight_map))
        files[file_name] = SafetensorsFile.open(path)
    place, stale = {name: files[file_name] for name, file_name in (weight_map or {}).items()}, []
    for name, file in place.items():
        if name not in file.tensors:
            raise CheckpointError(f"{file.path} has no tensor {short(name)}, but {INDEX_NAME} says so")
    for file in files.values():
        for name in file.tensors:
            if (owner := place.setdefault(name, file)) is file:
                continue
            if weight_map is None or name not in weight_map:
                raise CheckpointError(
                    f"{owner.path} and {file.path} both have tensor {short(name)}, and no index says which counts"
                )
            stale.append(name)
    more = f"{short(stale[0])}{f' and {len(stale) - 1} more' if len(stale) > 1 else ''}" if stale else ""
    return Shards(tuple(files.values()), place, more and f"copies of {more} outside the files of {INDEX_NAME} are left out")


def shard_names(folder: Path) -> list[str]:
    """The files with weights of a folder without an index: one, or the parts of one; none if there are neither.

    Raises CheckpointError if there are parts of several.
    """
    if os.path.lexists(folder / SINGLE_NAME) or not os.path.isdir(folder):
        return [SINGLE_NAME] if os.path.lexists(folder / SINGLE_NAME) else []
    parts = {(match[1], match[2]) for path in folder.glob("*.safetensors") if (match := _PART.fullmatch(path.name))}
    parts = {part for part in parts if part[0] == "model"} or parts
    if len(parts) > 1:
        named = ", ".join(short(f"{stem}-?-of-{count}.safetensors") for stem, count in sorted(parts)[:4])
        raise CheckpointError(f"{folder} has no {INDEX_NAME}, and parts of {len(parts)} files: {named}; leave those of one")
    for stem, count in parts:
        if not 1 <= int(count) <= MAX_SHARDS:
            raise CheckpointError(f"{folder} has a part of {int(count)} files, at most {MAX_SHARDS} are accepted")
        return [f"{stem}-{number:0{len(count)}d}-of-{count}.safetensors" for number in range(1, int(count) + 1)]
    return []


def _missing_file(folder: Path, file_name: str, weight_map: Mapping[str, str] | None) -> str:
    if weight_map is not None:
        num_tensors = sum(place == file_name for place in weight_map.values())
        return f"{folder / file_name} is missing: {INDEX_NAME} places {num_tensors} tensors in it; {download_again(folder)}"
    if (match := _PART.fullmatch(file_name)) is not None:
        return f"{folder / file_name} is missing, one of {int(match[2])} parts; {download_again(folder)}"
    found = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    seen = f"; it has {', '.join(map(short, found[:4]))}" if found else ""
    return f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}{seen}; weights must be in safetensors files with an index"


def _read_index(folder: Path, manifest: Manifest | None) -> dict[str, str] | None:
    """Tensor name -> file name, or None if the folder has no index."""
    parsed = read_json(folder, INDEX_NAME, manifest)
    if parsed is None:
        return None
    path, weight_map = folder / INDEX_NAME, parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is not an index of safetensors files: expected a weight_map that is not empty")
    if len(weight_map) > MAX_INDEXED:
        raise CheckpointError(f"{path} places {len(weight_map)} tensors, at most {MAX_INDEXED} are accepted")
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
