"""Shapes of the monokernel for models whose layers are stored one by one: sums over kinds of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kog_dist.bench.kernel.trial_shape import TrialShape
from kog_dist.errors import ConfigError
from kog_dist.model.layers import Ffn
from kog_dist.model.spec import ModelSpec
from kog_dist.workers.cuda.kernel_header import shape_header
from kog_dist.workers.cuda.kernel_shape import KernelShape

FLAT = ModelSpec(
    hidden_size=64, num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=128, vocab_size=76, max_context=64, num_lanes=4,
    delay=0, qk_norm=True, own_head_dim=32,
)  # fmt: skip


def stored(spec: ModelSpec, **others: Any) -> ModelSpec:
    """The same model, with its layers one by one."""
    fields = ("hidden_size", "vocab_size", "max_context", "num_lanes", "norm_eps")
    return ModelSpec.of_layers(spec.layers, **{name: getattr(spec, name) for name in fields} | others)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_stored_layers_of_one_kind_are_the_same_build(num_ranks: int) -> None:
    of_flat, of_stored = (
        TrialShape(spec, spec.lanes_of_rank(0, num_ranks), num_ranks=num_ranks, max_ctas=4, untried=True)
        for spec in (FLAT, stored(FLAT))
    )
    assert shape_header(of_stored) == shape_header(of_flat)
    assert of_stored.cache.num_bytes == of_flat.cache.num_bytes
    assert of_stored.words.lists == of_flat.words.lists


def test_only_who_says_so_takes_them() -> None:
    spec = stored(FLAT)
    with pytest.raises(ConfigError, match=r"it has layers of several kinds \(supported: plain attention\); use --device cpu"):
        KernelShape(spec, range(4), max_ctas=4)
    with pytest.raises(ConfigError, match="it has layers of several kinds"):
        TrialShape(spec, range(4), max_ctas=4)
    layers = [*spec.layers[:2], replace(spec.layers[0], ffn=Ffn(256))]
    with pytest.raises(ConfigError, match=r"it has FFNs of several kinds \(1\)"):
        TrialShape(replace(spec, mixed_layers=tuple(layers)), range(4), max_ctas=4, untried=True)
