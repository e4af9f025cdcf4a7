"""Mistral: a Llama whose layers may all have a sliding window."""

from __future__ import annotations

from kog_dist.model.families.computation import all_layers
from kog_dist.model.families.dense import HEAD, IGNORED, KEYS, num_layers_of, read_dense, rounded_lanes, stored_names
from kog_dist.model.families.fields import Config, number
from kog_dist.model.families.stored import Family
from kog_dist.model.spec import ModelSpec

_WINDOW = 4096  # of a config without the key; null is none


def read_config(config: Config) -> ModelSpec:
    """The spec of a MistralForCausalLM. Raises ConfigError."""
    layers = tuple(range(num_layers_of(config)))
    is_null = "sliding_window" in config and config["sliding_window"] is None
    windows = (None, ()) if is_null else (int(number(config, "sliding_window", _WINDOW, int)), layers)
    return read_dense(config, max_context=131_072, kv_heads=8, windows=windows)


def _layer_types(config: Config) -> tuple[object, ...]:
    return all_layers("full_attention" if config.get("sliding_window", _WINDOW) is None else "sliding_attention")(config)


FAMILY = Family(
    ("mistral",),
    read_config,
    stored_names,
    IGNORED,
    HEAD,
    rounded_lanes=rounded_lanes,
    keys=KEYS | {"sliding_window"},
    own={"use_sliding_window": (True, False), "layer_types": _layer_types},
)
