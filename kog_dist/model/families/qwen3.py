"""Qwen3: query and key heads are normed, and have 128 values whatever the hidden size."""

from __future__ import annotations

from kog_dist.model.families.dense import (
    HEAD,
    HEAD_NORMS,
    IGNORED,
    KEYS,
    WINDOW_KEYS,
    qwen_windows,
    read_dense,
    rounded_lanes,
    stored_names,
)
from kog_dist.model.families.fields import Config, number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec


def read_config(config: Config) -> ModelSpec:
    """The spec of a Qwen3ForCausalLM. Raises ConfigError."""
    windows, bias = qwen_windows(config), number(config, "attention_bias", False, bool)
    return read_dense(
        config, max_context=32_768, head_dim=128, kv_heads=32, windows=windows, qkv_bias=bias, out_bias=bias, qk_norm=True
    )


FAMILY = Family(
    ("qwen3",),
    read_config,
    stored_names,
    IGNORED,
    HEAD,
    rounded_lanes=rounded_lanes,
    keys=KEYS | WINDOW_KEYS | {"attention_bias"},
    own=HEAD_NORMS,
)
