"""generation_config.json: the ids that end an answer, and the model's own sampling."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kog_dist.errors import CheckpointError
from kog_dist.model.generation_config import GENERATION_CONFIG_NAME, MAX_EOS_IDS, read_eos_ids, read_sampling_defaults
from tests.fuzz.json_mutation import fuzzed_json as mutate
from tests.fuzz.refusals import refused

__all__ = ["mutate", "one_input"]

FOLDER = Path(tempfile.mkdtemp())


def one_input(data: bytes) -> None:
    """What is accepted lies within the limits of a request."""
    (FOLDER / GENERATION_CONFIG_NAME).write_bytes(data)
    with refused(CheckpointError):
        assert len(read_eos_ids(FOLDER)) <= MAX_EOS_IDS
    with refused(CheckpointError):
        defaults = read_sampling_defaults(FOLDER)
        assert 0 <= defaults.top_p <= 1
        assert defaults.temperature >= 0
