"""A safetensors file: its header, and the bytes of every tensor that the header describes."""

from __future__ import annotations

import random
import struct
import tempfile
from pathlib import Path

import atheris
import numpy as np

from kog_dist.errors import CheckpointError
from kog_dist.model.safetensors_file import DTYPES, SafetensorsFile
from tests.fuzz.json_mutation import mutate_json
from tests.fuzz.refusals import refused

PATH = Path(tempfile.mkdtemp()) / "model.safetensors"


def one_input(data: bytes) -> None:
    """Tensors of an accepted file cover it without holes, and can be read."""
    PATH.write_bytes(data)
    with refused(CheckpointError):
        file = SafetensorsFile.open(PATH)
        begin = 8 + int.from_bytes(data[:8], "little")
        assert begin + sum(tensor.end - tensor.begin for tensor in file.tensors.values()) == len(data)
        for name, tensor in file.tensors.items():
            assert len(file.raw(name, 0, tensor.end - tensor.begin)) == tensor.end - tensor.begin
            if tensor.shape and tensor.shape[0] and tensor.dtype in DTYPES:
                num_values = (tensor.end - tensor.begin) // DTYPES[tensor.dtype][1]
                with refused(CheckpointError):
                    file.read(name, 0, tensor.shape[0], np.empty(num_values, np.float32), verify=True)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes of the header, whose length is then right again; or of bytes."""
    rng = random.Random(seed)
    length = int.from_bytes(data[:8], "little")
    changed = mutate_json(data[8 : 8 + length], rng) if rng.random() < 0.7 else None
    if changed is None:
        return bytes(atheris.Mutate(data, max_size))
    return (struct.pack("<Q", len(changed)) + changed + data[8 + length :])[:max_size]
