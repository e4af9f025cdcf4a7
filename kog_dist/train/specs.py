"""Shapes of the models that are trained here."""

from __future__ import annotations

from kog_dist.errors import ConfigError
from kog_dist.model.spec import ModelSpec


def demo_spec() -> ModelSpec:
    """The bundled demo model: 16.4 M parameters, 32.8 MB in bfloat16, 14.8 M parameters read per token."""
    return ModelSpec(
        hidden_size=384, num_layers=6, num_heads=8, num_kv_heads=8, intermediate_size=1408, vocab_size=4096,
        max_context=2048, num_lanes=8, delay=2, sliding_window=256, window_layers=(0, 1, 2, 3),
    )  # fmt: skip


def ablation_spec() -> ModelSpec:
    """What the ablation compares: 4.2 M parameters, deep enough for a delay of 4, with heads and FFN for 2, 4 or 8 lanes."""
    return ModelSpec(
        hidden_size=128,
        num_layers=12,
        num_heads=8,
        num_kv_heads=8,
        intermediate_size=512,
        vocab_size=4096,
        max_context=512,
        num_lanes=8,
        delay=2,
    )


def nano_spec() -> ModelSpec:
    """A model that trains in seconds on a CPU, with every feature of the demo model."""
    return ModelSpec(
        hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=4, intermediate_size=64, vocab_size=320,
        max_context=256, num_lanes=4, delay=1, sliding_window=16, window_layers=(0, 1),
    )  # fmt: skip


def named_spec(name: str) -> ModelSpec:
    """`demo`, `nano` or `ablation`. Raises ConfigError for another name."""
    specs = {"demo": demo_spec, "nano": nano_spec, "ablation": ablation_spec}
    if name not in specs:
        raise ConfigError(f"there is no model shape {name!r}; choose one of {', '.join(specs)}")
    return specs[name]()
