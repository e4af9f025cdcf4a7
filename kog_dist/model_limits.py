"""Bounds of everything that a model folder may ask for, far above any model: checked before an object of that size is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kog_dist.errors import ConfigError

# Of a model. A lane of a layer is what plan, validator and layouts make objects of.
MAX_LANES = 128
MAX_LAYERS = 4096
MAX_LANES_OF_LAYERS = 16_384
MAX_HEADS = 4096
MAX_HIDDEN_SIZE = 65_536
MAX_HEAD_DIM = 4096
MAX_INTERMEDIATE_SIZE = 2**20
MAX_VOCAB_SIZE = 2**20
MAX_CONTEXT = 2**20
MAX_WINDOW = 2**31
MAX_EXPERTS = 1024
MAX_EXPERTS_OF_LAYERS = 32_768

# Numbers with a fraction, far beyond those of any model: a damaged one has bits that mean a number all the same.
NORM_EPS = (1e-12, 0.1)
ROPE_THETA = (10.0, 1e12)
ROPE_FACTOR = (1.0, 2.0**14)
ROPE_MAGNITUDE = (1e-2, 1e2)  # of cosines and sines
ROPE_TURNS = (1e-3, 2.0**14)  # beta_slow, beta_fast, low_freq_factor, high_freq_factor
SWIGLU_ALPHA = (1e-2, 1e2)
SWIGLU_LIMIT = (1e-2, 1e4)

# Of safetensors files.
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_INDEXED = 2**18  # tensors of all files
MAX_SHARDS = 1024

# Of GGUF files. Items are the entries of all arrays: tokens, their types and scores, merges.
MAX_GGUF_HEADER_BYTES = 64 * 2**20
MAX_GGUF_KEYS = 4096
MAX_GGUF_ITEMS = 2 * 2**20


def check_range(name: str, value: float, bounds: tuple[float, float]) -> None:
    """Raise ConfigError for a number that no model has, also for NaN."""
    if not bounds[0] <= value <= bounds[1]:
        raise ConfigError(
            f"{name} must be between {bounds[0]:g} and {bounds[1]:g}, got {value:g}; no model has such a number, so the file "
            "may be damaged: fetch it again"
        )


class FileLimit(NamedTuple):
    """Of a small file: its size, and commas, colons and brackets if it is JSON."""

    num_bytes: int
    num_items: int


OTHER_FILE = FileLimit(64 * 2**20, 0)
FILES: Mapping[str, FileLimit] = {
    "config.json": FileLimit(2**20, 2**15),
    "generation_config.json": FileLimit(2**20, 2**15),
    "hf_quant_config.json": FileLimit(2**20, 2**15),
    "tokenizer_config.json": FileLimit(16 * 2**20, 2**20),
    "special_tokens_map.json": FileLimit(2**20, 2**15),
    "tokenizer.json": FileLimit(64 * 2**20, 2**22),
    "model.safetensors.index.json": FileLimit(32 * 2**20, 4 * MAX_INDEXED),
    "manifest.json": FileLimit(64 * 2**20, 2**22),
    "chat_template.jinja": FileLimit(4 * 2**20, 0),
}
