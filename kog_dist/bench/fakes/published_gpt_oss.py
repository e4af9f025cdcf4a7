"""A folder of gpt-oss as published, experts in MXFP4, with random weights: how long it takes to load does not depend on them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from kog_dist.late_numpy import Array
from kog_dist.model.published_config import read_config
from kog_dist.model.safetensors_file import narrow, write_safetensors

_GROUP: Final = 32  # values with one scale
_SCALES: Final = (115, 119)  # exponents, 2^-12 to 2^-9: codes go up to 6
_WRITERS: Final = 4
_VALUES: Final = 1 << 22  # that are made of 16 bit; larger tensors repeat them

Stored = tuple[str, tuple[int, ...], Array]


class Ends(NamedTuple):
    """What is not of a layer, as bits of bfloat16: tables (vocabulary, hidden), and the weights of the last norm."""

    embedding: Array
    head: Array
    norm: Array


def write_gpt_oss(
    folder: Path,
    config: Mapping[str, Any],
    *,
    seed: int = 1,
    branch_exponent: int = 0,
    ends: Ends | None = None,
) -> None:
    """config.json and a file for each layer, and one for the rest. All layers have the same values.

    `config` is one of gpt-oss with MXFP4. `branch_exponent`: of two, by which what attention and experts add is multiplied.
    Takes the memory of a layer, of the embedding and of the LM head. Raises CheckpointError where a file cannot be
    written.
    """
    spec, made = read_config(config), _Made(seed)
    assert spec.experts is not None
    d, ffn, num_experts = spec.hidden_size, spec.intermediate_size, spec.experts.num_experts
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = {
        "input_layernorm.weight": made.ones(d),
        "post_attention_layernorm.weight": made.ones(d),
        "self_attn.sinks": made.values(spec.num_heads),
        "mlp.router.weight": made.values(num_experts, d),
        "mlp.router.bias": made.values(num_experts),
        "mlp.experts.gate_up_proj_bias": made.values(num_experts, 2 * ffn),
        "mlp.experts.down_proj_bias": made.values(num_experts, d, exponent=branch_exponent),
    }
    for name, rows, columns in (("q", queries, d), ("k", keys, d), ("v", keys, d), ("o", d, queries)):
        exponent = branch_exponent if name == "o" else 0
        layer |= {
            f"self_attn.{name}_proj.weight": made.values(rows, columns, exponent=exponent),
            f"self_attn.{name}_proj.bias": made.values(rows, exponent=exponent),
        }
    for name, rows, columns in (("gate_up_proj", 2 * ffn, d), ("down_proj", d, ffn)):
        groups, exponent = (num_experts, rows, columns // _GROUP), branch_exponent if name == "down_proj" else 0
        layer |= {
            f"mlp.experts.{name}_blocks": made.codes(*groups, _GROUP // 2),
            f"mlp.experts.{name}_scales": made.scales(*groups, exponent=exponent),
        }
    shape = spec.vocab_size, d
    norm = made.ones(d)
    embedding, head = made.values(*shape), made.values(*shape)
    if ends is not None:
        embedding, head, norm = (("BF16", values.shape, values) for values in ends)
    rest = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": norm}
    names = [f"model-{number:05}-of-{spec.num_layers:05}.safetensors" for number in range(spec.num_layers + 1)]
    held = [rest, *({f"model.layers.{i}.{name}": one for name, one in layer.items()} for i in range(spec.num_layers))]
    with ThreadPoolExecutor(_WRITERS) as pool:
        for done in [pool.submit(write_safetensors, folder / name, tensors) for name, tensors in zip(names, held, strict=True)]:
            done.result()
    place = {tensor: name for name, tensors in zip(names, held, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))


def folder_bytes(config: Mapping[str, Any]) -> int:
    """What the tensors of such a folder take."""
    spec = read_config(config)
    assert spec.experts is not None
    num_coded = 3 * spec.num_layers * spec.experts.num_experts * spec.hidden_size * spec.intermediate_size
    return 2 * (spec.num_parameters - num_coded) + num_coded * (_GROUP // 2 + 1) // _GROUP


class _Made:
    """Random tensors as files have them: (dtype, shape, array)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def ones(self, *shape: int) -> Stored:
        return "BF16", shape, narrow(np.ones(shape, np.float32), "BF16")

    def values(self, *shape: int, exponent: int = 0) -> Stored:
        """Of a deviation of one by the root of the last dimension, times two to the exponent."""
        size = int(np.prod(shape))
        some = self._random.standard_normal(min(size, _VALUES), np.float32) * (shape[-1] ** -0.5 * 2.0**exponent)
        return "BF16", shape, np.resize(narrow(some, "BF16"), shape)

    def codes(self, *shape: int) -> Stored:
        return "U8", shape, np.frombuffer(self._random.bytes(int(np.prod(shape))), np.uint8)

    def scales(self, *shape: int, exponent: int = 0) -> Stored:
        return "U8", shape, self._random.integers(_SCALES[0] + exponent, _SCALES[1] + exponent, shape, np.uint8)
