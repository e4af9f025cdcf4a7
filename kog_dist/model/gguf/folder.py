"""A GGUF file, or its parts, in place of a model folder: itself as MODEL, or the only one of a folder without safetensors.

The small files that it stands for are made from its header; those that lie next to it in a folder win over them.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import CheckpointError, ConfigError
from kog_dist.late_numpy import NDArray, np
from kog_dist.model.exact_file import FileIdentity, file_identity, opened
from kog_dist.model.families import delta_nets
from kog_dist.model.gguf import config, vocabulary
from kog_dist.model.gguf.delta_nets import MODEL_TYPES
from kog_dist.model.gguf.header import GgufHeader, read_header
from kog_dist.model.gguf.tensors import GgufFile, is_gguf, read_plain
from kog_dist.model.hub_cache import check_inside, download_again
from kog_dist.model_limits import MAX_SHARDS
from kog_dist.quoting import short

_STANDS_FOR = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_PART: Final = re.compile(r"(.{1,200})-([0-9]{5})-of-([0-9]{5})\.gguf")
_OF_TEXTS = ("tokenizer.json", "tokenizer_config.json")


def gguf_of(folder: Path) -> Path | None:
    """The file that has the weights of `folder`, or the first of its parts; None if safetensors have them, or nothing does.

    Raises CheckpointError if there are several, or if a link leads out of the folder.
    """
    if is_gguf(folder):
        return first_part(folder)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if any(name.endswith(".safetensors") or name == "model.safetensors.index.json" for name in names):
        return None
    found = sorted({first_part(folder / name) for name in names if name.endswith(".gguf")})
    if len(found) > 1:
        listed = ", ".join(short(path.name) for path in found[:4])
        raise CheckpointError(f"{folder} has {len(found)} GGUF files ({listed}); give one of them instead of the folder")
    for part in _parts(found[0]) if found else ():
        check_inside(folder, part)
    return found[0] if found else None


def first_part(path: Path) -> Path:
    """The first of the files of which `path` is one: `NAME-00001-of-00003.gguf`; the file itself if its name is no part's."""
    match = _PART.fullmatch(path.name)
    return path if match is None else path.with_name(f"{match[1]}-00001-of-{match[3]}.gguf")


def tagged_file(folder: Path, tag: str) -> Path:
    """The GGUF file with `tag` in its name, such as Q8_0, in a snapshot of the Hub's cache or a folder of it; or its first part.

    Raises CheckpointError if there is none, or several, or if a link leads out of the cache.
    """
    every = (path for path in (*folder.glob("*.gguf"), *folder.glob("*/*.gguf")) if not path.name.startswith("mmproj"))
    files = sorted(set(map(first_part, every)))
    word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(tag)}(?![A-Za-z0-9_])", re.IGNORECASE)
    found = [path for path in files if word.search(model_name(path))]
    if len(found) != 1:
        listed = ", ".join(short(str(path.relative_to(folder))) for path in (found or files)[:8])
        what = f"{len(found)} GGUF files" if found else "no GGUF file"
        raise CheckpointError(f"{folder} has {what} with {short(tag)} in the name; it has {listed or 'none at all'}")
    for part in _parts(found[0]):
        check_inside(folder, part)
    return found[0]


def model_name(path: Path) -> str:
    """The name of a model in a file, without what says which part it is."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match[1]


def published_file(folder: Path, name: str) -> bytes | None:
    """The content of one of the small files that the folder's GGUF file stands for; None for others. Raises CheckpointError."""
    if name not in _STANDS_FOR:
        return None
    path = gguf_of(folder)
    model = None if path is None else _model(path)
    return None if model is None or (name in _OF_TEXTS and not model.has_vocabulary) else model.small_file(name)


def open_weights(folder: Path) -> tuple[GgufFile, ...]:
    """The weights of the folder's GGUF file, or of its parts; nothing if it has none. Raises CheckpointError."""
    path = gguf_of(folder)
    return () if path is None else _model(path).weights()


def main_format(folder: Path) -> str | None:
    """The format of most values of the folder's GGUF file, such as Q4_K; None if it has none. Raises CheckpointError."""
    path = gguf_of(folder)
    if path is None:
        return None
    num_values: Counter[str] = Counter()
    for tensor in _model(path).header.tensors.values():
        num_values[tensor.format.name] += math.prod(tensor.shape)
    return next((name for name, _ in num_values.most_common(1)), None)


class _Model:
    """A file, or parts, with what their headers say; small files are made when they are asked for, and kept."""

    def __init__(self, headers: tuple[GgufHeader, ...]) -> None:
        tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
        self.headers, self.header = headers, replace(headers[0], tensors=tensors)
        self._made: dict[str, bytes] = {}

    @property
    def has_vocabulary(self) -> bool:
        return self.header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")

    def small_file(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = vocabulary.to_json(self._make(name))
        return self._made[name]

    def weights(self) -> tuple[GgufFile, ...]:
        made, architecture = self._make("config.json"), self.header.metadata.get("general.architecture")
        try:
            spec = delta_nets.read_config(made) if architecture in MODEL_TYPES else None
        except ConfigError as error:
            raise CheckpointError(f"{self.header.path}: {error}") from None
        return tuple(GgufFile.from_header(header, architecture, made["head_dim"], spec) for header in self.headers)

    def _rope_factors(self) -> NDArray[np.float32]:
        return read_plain(next(header for header in self.headers if config.ROPE_FACTORS in header.tensors), config.ROPE_FACTORS)

    def _make(self, name: str) -> Mapping[str, Any]:
        header = self.header
        try:
            if name == "config.json":
                return config.read_config(header, self._rope_factors)
            if name == "generation_config.json":
                return config.read_generation_config(header.metadata)
            if name == "tokenizer_config.json":
                return vocabulary.read_tokenizer_config(header.metadata)
            return vocabulary.read_tokenizer(header.metadata)
        except ValueError as error:
            raise CheckpointError(f"{header.path}: {error}") from None


def _model(path: Path) -> _Model:
    found = []
    for part in (parts := _parts(path)):
        if len(parts) > 1 and not os.path.exists(part):
            raise CheckpointError(f"{part} is missing, one of {len(parts)} parts; {download_again(path.parent)}")
        with opened(part) as fd:
            found.append((part, file_identity(fd)))
    return _read(tuple(found))


def _parts(first: Path) -> list[Path]:
    """All files of the one whose first part, or only one, is given. Raises CheckpointError if they are too many."""
    match = _PART.fullmatch(first.name)
    if match is None:
        return [first]
    if not 1 <= int(match[3]) <= MAX_SHARDS:
        raise CheckpointError(f"{first} is a part of {int(match[3])} files, at most {MAX_SHARDS} are accepted")
    return [first.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


@lru_cache(maxsize=2)
def _read(parts: tuple[tuple[Path, FileIdentity], ...]) -> _Model:
    headers = tuple(read_header(path) for path, _ in parts)
    seen: dict[str, Path] = {}
    for number, header in enumerate(headers):
        count, place = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if (count or 1, place) != (len(headers), number):
            said = f"part {short(place)} (counted from 0) of {short(count)}"
            raise CheckpointError(
                f"{header.path} says that it is {said}, here it is {number} of {len(headers)}; parts are named "
                "NAME-00001-of-00003.gguf and lie side by side"
            )
        for name in header.tensors:
            if seen.setdefault(name, header.path) != header.path:
                raise CheckpointError(f"{header.path} has tensor {short(name)}, which {seen[name].name} has, too")
    total = headers[0].metadata.get("split.tensors.count", len(seen))
    if len(headers) > 1 and total != len(seen):
        raise CheckpointError(f"{headers[0].path} and its parts have {len(seen)} tensors, but the first says {short(total)}")
    return _Model(headers)
