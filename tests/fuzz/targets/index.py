"""model.safetensors.index.json, next to the shards that it names or does not."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.bench.fakes.tiny_model import TINY
from kog_dist.errors import CheckpointError
from kog_dist.model.checkpoint import open_checkpoint
from kog_dist.model.shards import INDEX_NAME
from kog_dist.model.written_checkpoint import random_tensors, write_checkpoint
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

FOLDER = Path(tempfile.mkdtemp())
write_checkpoint(FOLDER, TINY, random_tensors(TINY, seed=1), max_shard_bytes=40_000, manifest=False)
TENSORS = set(open_checkpoint(FOLDER).owner)


def one_input(data: bytes) -> None:
    """Whatever index is accepted, it leads to all tensors of the model."""
    (FOLDER / INDEX_NAME).write_bytes(data)
    with refused(CheckpointError):
        assert set(open_checkpoint(FOLDER).owner) == TENSORS
