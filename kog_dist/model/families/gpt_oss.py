"""gpt-oss-20b and -120b: experts in MXFP4 or 16 bit, attention with sinks and biases, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kog_dist.errors import ConfigError
from kog_dist.model.experts import ClampedSwiglu, ExpertsSpec
from kog_dist.model.families import dense
from kog_dist.model.families.dense import HEAD, IGNORED, KEYS, num_layers_of, read_dense
from kog_dist.model.families.fields import Config, number
from kog_dist.model.families.stored import Family, Names, StoredTensorName
from kog_dist.model.formats.quantisation import KEY, read_quantisation
from kog_dist.model.formats.stacked_experts import Part, Place, down, gate, unstacked, up
from kog_dist.model.layout import EXPERTS, TensorLayout
from kog_dist.model.safetensors_file import SafetensorsFile
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short

_KEYS: Final = frozenset(
    """attention_bias num_local_experts num_experts_per_tok experts_per_token sliding_window layer_types
    swiglu_limit swiglu_alpha initial_context_length""".split()
)
_THETA: Final = 150_000.0
_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}  # of a config without rope_scaling and rope_parameters
_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"


def read_config(config: Config) -> ModelSpec:
    """The spec of a GptOssForCausalLM. Raises ConfigError."""
    quantisation = read_quantisation(config)
    if quantisation is not None and not quantisation.is_of_experts:
        raise ConfigError(f"{KEY}: quant_method {quantisation.method} of gpt_oss is not supported; supported: mxfp4")
    bias = number(config, "attention_bias", True, bool)
    experts = ExpertsSpec(
        num_experts=_num_experts(config),
        per_token=_per_token(config),
        router_bias=True,
        bias=True,
        clamp=ClampedSwiglu(number(config, "swiglu_alpha", 1.702, float), number(config, "swiglu_limit", 7.0, float)),
    )
    return read_dense(
        _with_rope(config), max_context=131_072, head_dim=64, kv_heads=8, windows=_windows(config), qkv_bias=bias,
        out_bias=bias, attention_sinks=True, experts=experts, stacks_experts=True, norm_eps=1e-5,
    )  # fmt: skip


def _num_experts(config: Config) -> int:
    """Raises ConfigError, also where the key is missing: the default of transformers is that of one model alone."""
    if config.get("num_local_experts") is None:
        raise ConfigError(
            "config key num_local_experts is missing, the number of experts of a layer: gpt-oss-20b has 32, gpt-oss-120b 128"
        )
    return int(number(config, "num_local_experts", None, int))


def _per_token(config: Config) -> int:
    """Under either of two keys; published files have both. Raises ConfigError."""
    chosen = int(number(config, "num_experts_per_tok", number(config, "experts_per_token", 4, int), int))
    if config.get("experts_per_token") not in (None, chosen):
        raise ConfigError(f"num_experts_per_tok {chosen} contradicts experts_per_token {short(config['experts_per_token'])}")
    return chosen


def _with_rope(config: Config) -> Mapping[str, object]:
    """With the rotary base and scaling that a config means which does not say."""
    given = [config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key) is not None]
    changes: dict[str, object] = {} if given else {"rope_scaling": _ROPE}
    nested = any(isinstance(raw, Mapping) and raw.get("rope_theta") is not None for raw in given)
    if config.get("rope_theta") is None and not nested:
        changes["rope_theta"] = _THETA
    return {**config, **changes}


def _windows(config: Config) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window and the layers that have it: every other one from the first on, unless `layer_types` says otherwise."""
    num_layers = num_layers_of(config)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_FULL if layer % 2 else _SLIDING for layer in range(max(num_layers, 0))]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_SLIDING, _FULL) for kind in kinds):
        raise ConfigError(f"layer_types {short(kinds)} must be {_SLIDING} or {_FULL} for each of {num_layers} layers")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _SLIDING)
    return (int(number(config, "sliding_window", 128, int)), layers) if layers else (None, ())


def _module(layer_idx: int | str) -> str:
    return f"model.layers.{layer_idx}.mlp.experts"


def stored_names(spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """transformers' names, and those of `stacked_experts` for the parts of stacks."""
    return dense.names_beside(_stored, spec, layouts)


def _stored(name: str) -> StoredTensorName:
    _, _, layer_idx, _, *expert, part, kind = name.split(".")
    if EXPERTS not in name:
        return StoredTensorName(f"model.layers.{layer_idx}.mlp.router.{kind}")
    make = {"w1": gate, "w3": up, "w2": down}[part]
    stacked: Part = make(_module(layer_idx), int(expert[1]), "_bias" if kind == "bias" else "")
    return StoredTensorName(stacked.name, is_whole=True, has_columns=part == "w2" and kind == "weight")


def _unstack(folder: Path, spec: ModelSpec, place: Place, is_coded: bool) -> dict[str, SafetensorsFile]:
    return unstacked(folder, spec, place, [_module(layer_idx) for layer_idx in range(spec.num_layers)], is_coded=is_coded)


FAMILY = Family(
    ("gpt_oss",),
    read_config,
    stored_names,
    IGNORED,
    HEAD,
    _unstack,
    keys=KEYS | _KEYS,
    has_experts=True,
    own={"use_sliding_window": (True,)},
)
