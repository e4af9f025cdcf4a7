"""`manifest.json` of a model folder: SHA-256 of every tensor part, safetensors header and small file. Checked when present."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.foreign_file import read_file
from kog_dist.model.exact_file import refuse_pointer
from kog_dist.model.gguf.folder import published_file
from kog_dist.model.hub_cache import check_blob_content, check_inside, download_again
from kog_dist.model.layout import TensorLayout
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model_limits import FILES, OTHER_FILE
from kog_dist.quoting import short
from kog_dist.records import dataclass
from kog_dist.strict_json import parse_object
from kog_dist.system.files import write_at_once

MANIFEST_NAME = "manifest.json"
_INDEX_NAME = "model.safetensors.index.json"
_FORMAT = "kog_dist manifest 1"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Hashes in lower-case hex.

    files: of whole small files by name; headers: of the 8 length bytes and header of each safetensors file; tensors: one hash per
    lane part (`TensorLayout.parts`), so that a rank can check exactly the bytes it loads.
    """

    files: Mapping[str, str]
    headers: Mapping[str, str]
    tensors: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_folder(cls, folder: Path) -> Manifest | None:
        """Read it; None if the folder has none. Raises CheckpointError if it cannot be read or is not a manifest."""
        path = folder / MANIFEST_NAME
        raw = read_small_file(folder, MANIFEST_NAME, None)
        if raw is None:
            return None
        try:
            parsed = parse_object(raw, FILES[MANIFEST_NAME].num_items)
            if parsed["format"] != _FORMAT or set(parsed) != {"format", "files", "headers", "tensors"}:
                raise ValueError(f"expected format {_FORMAT!r} with files, headers and tensors")
            tensors = {name: tuple(map(_hash, parts)) for name, parts in parsed["tensors"].items()}
            by_name = [{name: _hash(value) for name, value in parsed[key].items()} for key in ("files", "headers")]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged or not a manifest of this program: {error}") from None
        return cls(by_name[0], by_name[1], tensors)

    def write(self, folder: Path) -> None:
        """Write it as `manifest.json`. Raises CheckpointError naming the file if that fails."""
        content = {"format": _FORMAT, "files": self.files, "headers": self.headers, "tensors": self.tensors}
        write_small_file(folder / MANIFEST_NAME, json.dumps(content, indent=1).encode() + b"\n")


def _hash(value: object) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{short(value)} is not a SHA-256")
    return value


def read_small_file(folder: Path, name: str, manifest: Manifest | None) -> bytes | None:
    """Bytes of a file of the folder, or of what its GGUF file says in its place; None if it is not there and not promised.

    Raises CheckpointError if it cannot be read, lies outside the folder, is larger than such a file may be, or is not what the
    manifest, or the name of its blob in a cache, says.
    """
    path, most = folder / name, FILES.get(name, OTHER_FILE).num_bytes
    expected = manifest.files.get(name) if manifest else None
    if expected is None and not os.path.lexists(path):
        return published_file(folder, name)
    check_inside(folder, path)
    try:
        if not os.path.isfile(path):
            raise CheckpointError(f"{path} is missing or no regular file; {download_again(folder)}")
        raw = read_file(path, most)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except MemoryError:
        raise CheckpointError(f"{path} cannot be read: there is not enough memory") from None
    refuse_pointer(path, raw)
    if expected is not None and hashlib.sha256(raw).hexdigest() != expected:
        raise CheckpointError(f"{path} differs from its SHA-256 in {MANIFEST_NAME}: {repair(name)}")
    check_blob_content(path, raw)
    return raw


def repair(name: str) -> str:
    """What to do about a file that differs from the manifest."""
    return f"{name} is damaged (copy it again) or was edited (then remove {MANIFEST_NAME}, or write it anew)"


def write_small_file(path: Path, content: bytes) -> None:
    """Write a file completely or not at all. Raises CheckpointError naming it if that fails."""
    try:
        write_at_once(path, content)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from None


def read_json(folder: Path, name: str, manifest: Manifest | None) -> dict[str, object] | None:
    """A JSON object of the folder, None if there is no such file. Raises CheckpointError naming the file."""
    raw = read_small_file(folder, name, manifest)
    if raw is None:
        return None
    try:
        return parse_object(raw, FILES[name].num_items)
    except ValueError as error:
        raise CheckpointError(f"{folder / name} cannot be read as JSON: {error}") from None


def check_manifest(
    folder: Path, manifest: Manifest, files: tuple[SafetensorsFile, ...], layouts: Mapping[str, TensorLayout]
) -> None:
    """Raise CheckpointError if the folder has other files or tensors than `manifest` lists. Reads small files and no tensors."""
    for name in {"config.json", *([_INDEX_NAME] if os.path.exists(folder / _INDEX_NAME) else [])} - set(manifest.files):
        raise CheckpointError(f"{folder / MANIFEST_NAME} has no SHA-256 of {name}; remove it or write it anew")
    for name in manifest.files:
        if not os.path.isfile(folder / name):
            raise CheckpointError(f"{folder} has no {short(name)}, but {MANIFEST_NAME} lists it; copy the file again")
    read_small_file(folder, "config.json", manifest)
    if set(manifest.headers) != {file.path.name for file in files} or set(manifest.tensors) != set(layouts):
        raise CheckpointError(
            f"{folder / MANIFEST_NAME} lists other files or tensors than the folder has; remove it or write it anew"
        )
    for name, layout in layouts.items():
        if len(manifest.tensors[name]) != len(layout.parts):
            raise CheckpointError(f"{folder / MANIFEST_NAME} divides tensor {name} into other parts than its model has lanes")
    for file in files:
        if file.header_sha256 != manifest.headers[file.path.name]:
            raise CheckpointError(
                f"{file.path}: the header differs from its SHA-256 in {MANIFEST_NAME}: {repair(file.path.name)}"
            )
