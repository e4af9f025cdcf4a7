"""Bounds of everything that a model folder may ask for, far above any model: checked before an object of that size is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

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
MAX_EXPERTS_OF_LAYERS = 16_384

# Of safetensors files.
MAX_HEADER_BYTES = 16 * 2**20
MAX_TENSORS = 65_536
MAX_DIMENSIONS = 8
MAX_SHARDS = 1024

# Of GGUF files. Items are the entries of all arrays: tokens, their types and scores, merges.
MAX_GGUF_HEADER_BYTES = 64 * 2**20
MAX_GGUF_KEYS = 4096
MAX_GGUF_ITEMS = 2 * 2**20


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
    "model.safetensors.index.json": FileLimit(16 * 2**20, 4 * MAX_TENSORS),
    "manifest.json": FileLimit(64 * 2**20, 2**22),
    "chat_template.jinja": FileLimit(4 * 2**20, 0),
}
