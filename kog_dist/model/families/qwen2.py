"""Qwen2 and Qwen2.5: biases of queries, keys and values."""

from __future__ import annotations

from kog_dist.model.families.dense import HEAD, IGNORED, KEYS, WINDOW_KEYS, qwen_windows, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import Config
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec


def read_config(config: Config) -> ModelSpec:
    """The spec of a Qwen2ForCausalLM. Raises ConfigError."""
    windows = qwen_windows(config)
    return read_dense(config, max_context=32_768, kv_heads=32, windows=windows, qkv_bias=True)


FAMILY = Family(
    ("qwen2",),
    read_config,
    stored_names,
    IGNORED,
    HEAD,
    rounded_lanes=rounded_lanes,
    keys=KEYS | WINDOW_KEYS,
    own={"attention_bias": (True,), "qkv_bias": (True,), "use_qkv_bias": (True,)},
)
