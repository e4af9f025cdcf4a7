"""Mistral: a Llama whose layers may all have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kog_dist.model.families.dense import HEAD, IGNORED, num_layers_of, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec

_WINDOW = 4096  # of a config without the key; null is none


def read_config(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a MistralForCausalLM. Raises ConfigError."""
    layers = tuple(range(num_layers_of(config)))
    is_null = "sliding_window" in config and config["sliding_window"] is None
    windows = (None, ()) if is_null else (int(number(config, "sliding_window", _WINDOW, int)), layers)
    return read_dense(
        config, keys=frozenset(("sliding_window",)), fixed={"attention_bias": (False, None)}, max_context=131_072, kv_heads=8,
        windows=windows,
    )  # fmt: skip


FAMILY = Family(("mistral",), read_config, stored_names, IGNORED, HEAD, rounded_lanes=rounded_lanes)
