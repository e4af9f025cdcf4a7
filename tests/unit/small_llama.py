"""A small Llama, as transformers writes it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def write_small_llama(folder: Path, num_positions: int, dtype: torch.dtype = torch.float32) -> None:
    """Config and weights, the same whenever it is called; norms and all else are random."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=num_positions,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder)
