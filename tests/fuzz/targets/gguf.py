"""A GGUF file: header, tokenizer, template, config and tensors. An input is a JSON description of a file, or the file itself."""

from __future__ import annotations

import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kog_dist.errors import CheckpointError, RequestError
from kog_dist.model.generation_config import read_eos_ids, read_sampling_defaults
from kog_dist.model.gguf.folder import open_weights
from kog_dist.model.gguf.header import FORMATS
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.published_config import spec_of_folder
from kog_dist.model.tokenizer import Tokenizer
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

PATH = Path(tempfile.mkdtemp()) / "model.gguf"
TEXT = "def area(r):\n    return 3.14 * r  # \u6771\u4eac \U0001f600"
MAX_BYTES = 1 << 24  # of tensors in a file that is described
_BOOL, _STRING, _ARRAY, _INT, _FLOAT = 7, 8, 9, 11, 12  # numbers of the format's types


def one_input(data: bytes) -> None:
    """What is accepted has a shape, layouts, tokens that decode, and tensors that can be read."""
    _write(data)
    with refused(CheckpointError, RequestError):
        (weights,) = open_weights(PATH)
        spec = spec_of_folder(PATH)
        tensor_layouts(spec)
        read_eos_ids(PATH)
        read_sampling_defaults(PATH)
        for name, tensor in weights.tensors.items():
            if tensor.shape and 0 < math.prod(tensor.shape) <= 1 << 16:
                with refused(CheckpointError):
                    weights.read(name, 0, tensor.shape[0], np.empty(tensor.shape, np.float32), verify=True)
        tokenizer = Tokenizer.from_folder(PATH)
        if tokenizer is not None:
            tokenizer.encode(TEXT)
            tokenizer.decode(range(min(tokenizer.num_ids, 300)))


def _write(data: bytes) -> None:
    try:
        described = json.loads(data)
        metadata, tensors = dict(described["metadata"]), list(described["tensors"])
        head, num_bytes = _header(metadata, tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error, OverflowError):
        PATH.write_bytes(data)
        return
    with PATH.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + num_bytes)


def _header(metadata: dict[str, Any], tensors: list[Any]) -> tuple[bytes, int]:
    """The header of a file with these tensors, [name, sizes, type] each, and the bytes that they take: zeros."""
    keys = b"".join(_text(key) + _value(value) for key, value in metadata.items())
    entries, begin = b"", 0
    for name, sizes, kind in tensors:
        entries += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, begin)
        values, num_bytes = (FORMATS[kind].block_values, FORMATS[kind].block_bytes) if kind in FORMATS else (1, 1)
        begin += -(-math.prod(sizes) // values * num_bytes // 32) * 32
        if begin > MAX_BYTES:
            raise ValueError("more bytes than a case may take")
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + keys + entries, begin


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        items = [_value(item) for item in value]
        kinds = {item[:4] for item in items} or {struct.pack("<I", _STRING)}
        if len(kinds) > 1:
            raise ValueError("an array has items of one type")
        return struct.pack("<I", _ARRAY) + kinds.pop() + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Iq", _INT, value)
    if isinstance(value, float):
        return struct.pack("<Id", _FLOAT, value)
    return struct.pack("<I", _STRING) + _text(value)
