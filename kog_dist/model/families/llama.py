"""Llama, and what is one by another name: SmolLM2, DeepSeek-Coder, Yi."""

from __future__ import annotations

from kog_dist.model.families.dense import HEAD, IGNORED, KEYS, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import Config, number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec


def read_config(config: Config) -> ModelSpec:
    """The spec of a LlamaForCausalLM. Raises ConfigError."""
    bias = number(config, "attention_bias", False, bool)
    return read_dense(config, max_context=2048, qkv_bias=bias, out_bias=bias)


_KEYS = KEYS | {"attention_bias"}
FAMILY = Family(("llama",), read_config, stored_names, IGNORED, HEAD, rounded_lanes=rounded_lanes, keys=_KEYS)
