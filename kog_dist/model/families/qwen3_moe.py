"""Qwen3 with experts: Qwen3-30B-A3B, Qwen3-Coder-30B-A3B. Attention is Qwen3's; every layer has experts and nothing besides."""

from __future__ import annotations

from collections.abc import Mapping

from kog_dist.errors import ConfigError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.families import dense
from kog_dist.model.families.dense import FFN, HEAD, HEAD_NORMS, IGNORED, KEYS, WINDOW_KEYS, qwen_windows, read_dense
from kog_dist.model.families.fields import Config, number
from kog_dist.model.families.stored import Family, Names, StoredTensorName
from kog_dist.model.layout import TensorLayout
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short

_KEYS = frozenset(
    """attention_bias moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob""".split()
)


def read_config(config: Config) -> ModelSpec:
    """The spec of a Qwen3MoeForCausalLM. Raises ConfigError."""
    windows, bias = qwen_windows(config), number(config, "attention_bias", False, bool)
    experts = ExpertsSpec(
        num_experts=num_experts(config),
        per_token=number(config, "num_experts_per_tok", 8, int),
        is_normalised=number(config, "norm_topk_prob", False, bool),
    )
    return read_dense(
        config,
        max_context=32_768,
        kv_heads=4,
        windows=windows,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        experts=experts,
        ffn_key="moe_intermediate_size",
    )


def num_experts(config: Config) -> int:
    """Under either of its keys, of which transformers 5 writes the second. Raises ConfigError."""
    given = {key: config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None}
    if len(set(map(repr, given.values()))) > 1:
        both = " contradicts ".join(f"{key} {short(value)}" for key, value in given.items())
        raise ConfigError(both)
    return int(number(config, next(iter(given), "num_experts"), None, int))


def stored_names(spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """transformers' names: of attention as in dense models, of experts one tensor for each matrix of each."""
    return dense.names_beside(_stored, spec, layouts)


def _stored(name: str) -> StoredTensorName:
    model, layers, layer_idx, _, *expert, part, kind = name.split(".")
    prefix = f"{model}.{layers}.{layer_idx}.mlp"
    if part == "router":
        return StoredTensorName(f"{prefix}.gate.{kind}")
    return StoredTensorName(f"{prefix}.{'.'.join(expert)}.{FFN[part]}.{kind}", is_whole=True, has_columns=part == "w2")


FAMILY = Family(
    ("qwen3_moe",), read_config, stored_names, IGNORED, HEAD, keys=KEYS | WINDOW_KEYS | _KEYS, own=HEAD_NORMS, has_experts=True
)
