"""Llama, and what is one by another name: SmolLM2, DeepSeek-Coder, Yi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kog_dist.model.families.dense import HEAD, IGNORED, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec

_FIXED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "pretraining_tp": (1, None),
    "is_llama_config": (True, False, None),
    "rope_interleaved": (False, None),
}


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a LlamaForCausalLM. Raises ConfigError."""
    bias = number(config, "attention_bias", False, bool)
    keys = frozenset(("attention_bias",))
    return read_dense(config, keys=keys, fixed=_FIXED_VALUES, max_context=2048, qkv_bias=bias, out_bias=bias)


FAMILY = Family(("llama",), read_config, stored_names, IGNORED, HEAD, rounded_lanes=rounded_lanes)
