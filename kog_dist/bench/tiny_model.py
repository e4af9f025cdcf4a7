"""A model that decodes in a millisecond: random weights, every byte a token. For benchmarks of everything but the arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from kog_dist.model.checkpoint import random_tensors, write_checkpoint
from kog_dist.model.spec import ModelSpec

EOS_ID = 256


def write_tiny_model(folder: Path, *, max_context: int = 256, seed: int = 1) -> ModelSpec:
    """Write a checkpoint with a tokenizer into a new folder: four lanes, delay 1, one of two layers windowed."""
    spec = ModelSpec(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, intermediate_size=32, vocab_size=EOS_ID + 1,
        max_context=max_context, num_lanes=4, delay=1, sliding_window=24, window_layers=(0,),
    )  # fmt: skip
    write_checkpoint(folder, spec, random_tensors(spec, seed=seed))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=_byte_vocabulary(), merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<eos>"])
    library.save(str(folder / "tokenizer.json"))
    return spec


def _byte_vocabulary() -> dict[str, int]:
    """Byte-level BPE without merges: the printable character that stands for each byte, and the byte as its id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return {alphabet[byte]: byte for byte in range(256)}
