"""config.json: from bytes to everything whose size it decides before a weight is read."""

from __future__ import annotations

import random
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

from kog_dist.errors import CheckpointError
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.spec import ModelSpec
from tests.fuzz.json_mutation import mutate_json

FOLDER = Path(tempfile.mkdtemp())


def one_input(data: bytes) -> None:
    """A model's shape or CheckpointError; a shape that is accepted has layouts of a bounded size."""
    (FOLDER / "config.json").write_bytes(data)
    with suppress(CheckpointError):
        spec = ModelSpec.from_folder(FOLDER)
        assert ModelSpec.from_config(spec.to_config()) == spec
        tensor_layouts(spec)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes of its values more often than of its bytes."""
    rng = random.Random(seed)
    changed = mutate_json(data, rng) if rng.random() < 0.7 else None
    return (atheris.Mutate(data, max_size) if changed is None else changed)[:max_size]
