"""config.json: from bytes to a model's shape and everything that it decides before a weight is read."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.model.layout import tensor_layouts
from kog_dist.model.published_config import read_config, spec_of_folder
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

FOLDER = Path(tempfile.mkdtemp())


def one_input(data: bytes) -> None:
    """A shape that is accepted can be written and read again, and has layouts of a bounded size."""
    (FOLDER / "config.json").write_bytes(data)
    with refused(CheckpointError):
        spec = spec_of_folder(FOLDER)
        assert read_config(spec.to_config()) == spec
        tensor_layouts(spec)
