"""A folder with quantised weights: its `quantization_config`, and dtype and shape of every tensor of a small model.

An input is JSON with both, and with the pattern of bytes that tensors hold.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.formats.lanes import lane_codes, weight_format
from kog_dist.model.weight_bytes import bytes_per_token, formats
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

FOLDER = Path(tempfile.mkdtemp())
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 8, "max_position_embeddings": 8, "tie_word_embeddings": True,
}  # fmt: skip
MAX_BYTES = 1 << 20  # of all tensors
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I32": 4, "I64": 8}


def one_input(data: bytes) -> None:
    """What is accepted says how it is quantised, and each lane's values are those of its codes and scales."""
    if not _written(data):
        return
    with refused(CheckpointError):
        checkpoint = open_checkpoint(FOLDER)
        assert formats(checkpoint)
        assert bytes_per_token(checkpoint) > 0
        for name, layout in checkpoint.layouts.items():
            with refused(CheckpointError):
                checkpoint.tensor(name)
                if weight_format(checkpoint, name) is None:
                    continue
                for lane in range(len(layout.parts)):
                    first, last = layout.parts[lane]
                    values = np.empty(((last - first) * math.prod(layout.shape[1:-1]), layout.shape[-1]), np.float32)
                    checkpoint.read_part(name, lane, values, verify=True)
                    assert np.array_equal(lane_codes(checkpoint, name, lane).values(), values)


def _written(data: bytes) -> bool:
    """Whether the input describes a folder, which is then there."""
    try:
        described = json.loads(data)
        quantised, tensors, pattern = described["quantization_config"], described["tensors"], described.get("bytes", [0])
        entries, size = dict[str, Any](), 0
        for name, (dtype, shape) in tensors.items():
            num_bytes = math.prod(map(int, shape)) * _WIDTHS.get(dtype, 1)
            if not 0 <= num_bytes <= MAX_BYTES - size or len(name) > 200:
                return False
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + num_bytes]}
            size += num_bytes
        raw = (bytes(pattern[:64]) * (size // max(len(pattern[:64]), 1) + 1))[:size]
        header = json.dumps(entries).encode("utf-8", "surrogatepass")
        config = json.dumps(CONFIG | {"quantization_config": quantised}).encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return False
    if len(raw) != size:
        return False
    (FOLDER / "config.json").write_bytes(config)
    (FOLDER / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw)
    return True
