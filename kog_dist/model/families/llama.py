"""Llama, and what is one by another name: SmolLM2, DeepSeek-Coder, Yi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kog_dist.model.families.dense import HEAD, IGNORED, KEYS, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a LlamaForCausalLM. Raises ConfigError."""
    bias = number(config, "attention_bias", False, bool)
    return read_dense(config, max_context=2048, qkv_bias=bias, out_bias=bias)


_KEYS = KEYS | {"attention_bias"}
FAMILY = Family(("llama",), read_config, stored_names, IGNORED, HEAD, rounded_lanes=rounded_lanes, keys=_KEYS)
