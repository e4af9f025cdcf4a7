"""A GGUF file in place of a model folder: the file itself as MODEL, or the only one of a folder without safetensors.

The small files that it stands for are made from its header; those that lie next to it in a folder win over them.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kog_dist.errors import CheckpointError
from kog_dist.model.exact_file import FileIdentity, file_identity, opened
from kog_dist.model.gguf import config, vocabulary
from kog_dist.model.gguf.header import GgufHeader, read_header
from kog_dist.model.gguf.tensors import GgufFile, is_gguf, read_plain
from kog_dist.model.hub_cache import check_inside
from kog_dist.quoting import short

_STANDS_FOR = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_OF_TEXTS = ("tokenizer.json", "tokenizer_config.json")


def gguf_of(folder: Path) -> Path | None:
    """The file that has the weights of `folder`; None if safetensors have them, or nothing does.

    Raises CheckpointError if there are several, or if a link leads out of the folder.
    """
    if is_gguf(folder):
        return folder
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    if any(name.endswith(".safetensors") or name == "model.safetensors.index.json" for name in names):
        return None
    found = [folder / name for name in names if name.endswith(".gguf")]
    if len(found) > 1:
        names = ", ".join(short(path.name) for path in found[:4])
        raise CheckpointError(f"{folder} has {len(found)} GGUF files ({names}); give one of them instead of the folder")
    if found:
        check_inside(folder, found[0])
    return found[0] if found else None


def published_file(folder: Path, name: str) -> bytes | None:
    """The content of one of the small files that the folder's GGUF file stands for; None for others. Raises CheckpointError."""
    if name not in _STANDS_FOR:
        return None
    path = gguf_of(folder)
    model = None if path is None else _model(path)
    return None if model is None or (name in _OF_TEXTS and not model.has_vocabulary) else model.small_file(name)


def open_weights(folder: Path) -> GgufFile | None:
    """The weights of the folder's GGUF file, None if it has none. Raises CheckpointError."""
    path = gguf_of(folder)
    return None if path is None else _model(path).weights()


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
    """A file with what its header says; small files are made when they are asked for, and kept."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._made: dict[str, bytes] = {}

    @property
    def has_vocabulary(self) -> bool:
        return self.header.metadata.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")

    def small_file(self, name: str) -> bytes:
        if name not in self._made:
            self._made[name] = vocabulary.to_json(self._make(name))
        return self._made[name]

    def weights(self) -> GgufFile:
        return GgufFile.from_header(self.header, self._make("config.json")["head_dim"])

    def _make(self, name: str) -> Mapping[str, Any]:
        header = self.header
        try:
            if name == "config.json":
                return config.read_config(header, lambda: read_plain(header, config.ROPE_FACTORS))
            if name == "generation_config.json":
                return config.read_generation_config(header.metadata)
            if name == "tokenizer_config.json":
                return vocabulary.read_tokenizer_config(header.metadata)
            return vocabulary.read_tokenizer(header.metadata)
        except ValueError as error:
            raise CheckpointError(f"{header.path}: {error}") from None


def _model(path: Path) -> _Model:
    with opened(path) as fd:
        return _read(path, file_identity(fd))


@lru_cache(maxsize=2)
def _read(path: Path, identity: FileIdentity) -> _Model:
    return _Model(read_header(path))
