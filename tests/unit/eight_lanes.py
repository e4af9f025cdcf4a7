"""A model that eight GPUs can run, which the demo model is too small for: config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MISTRAL_7B: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32768,
}  # fmt: skip


def write_config(folder: Path) -> Path:
    """Write it; returns the folder."""
    (folder / "config.json").write_text(json.dumps(MISTRAL_7B))
    return folder
