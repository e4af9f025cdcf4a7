"""What Llama-like families share: one residual stream, transformers' tensor names, rotary pairs half a head apart.

Such a model runs in lane form with delay 0. The number of its lanes is fixed by its shape, so a request has the same bits on
every number of ranks that divides it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kog_dist.errors import ConfigError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.families.fields import Config, number, read_rope
from kog_dist.model.families.stored import Names, StoredTensorName
from kog_dist.model.formats.quantisation import read_quantisation
from kog_dist.model.layout import EMBEDDING, SINKS, TensorLayout
from kog_dist.model.spec import ModelSpec
from kog_dist.model_limits import MAX_LAYERS
from kog_dist.quoting import short

MOST_LANES = 8
LANE_WEIGHTS, SMALL_LAYER = 12_000_000, 4_000_000
CODED_LANE_COLUMNS = 1024
HEAD = "lm_head.weight"
IGNORED = ("rotary_emb.inv_freq",)  # old files have the table
KEYS = frozenset(
    """model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size
    max_position_embeddings original_max_position_embeddings rope_theta rope_scaling rope_parameters rms_norm_eps
    tie_word_embeddings quantization_config""".split()
)
HEAD_NORMS: Mapping[str, tuple[object, ...]] = {"use_qk_norm": (True,)}  # of families that have them
WINDOW_KEYS = frozenset(("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"))
_OUTER = {EMBEDDING: "model.embed_tokens.weight", "model.norm.weight": "model.norm.weight", HEAD: HEAD}
_ATTENTION = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj", "q_norm": "q_norm", "k_norm": "k_norm"}
FFN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_TURNED = ("wq", "wk", "q_norm", "k_norm")
_COLUMNS = ("wo", "w2")


def read_dense(
    config: Config,
    *,
    max_context: int,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    windows: tuple[int | None, tuple[int, ...]] = (None, ()),
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    attention_sinks: bool = False,
    experts: ExpertsSpec | None = None,
    ffn_key: str = "intermediate_size",
    stacks_experts: bool = False,
    norm_eps: float = 1e-6,
) -> ModelSpec:
    """The spec of a config of transformers; what follows it are its family's defaults, and what the caller has read.
    `ffn_key`: which one has the width of an FFN. `stacks_experts`: whether files have one tensor for all experts of a layer.

    Raises ConfigError naming the key that is missing or contradictory, or the feature that is not supported.
    """
    quantisation = read_quantisation(config)
    if quantisation is not None and quantisation.is_of_experts and not stacks_experts:
        raise ConfigError(f"quantization_config: quant_method {quantisation.method} is supported for gpt_oss alone")
    num_heads = number(config, "num_attention_heads", None, int)
    num_kv_heads = number(config, "num_key_value_heads", kv_heads or num_heads, int)
    intermediate_size = number(config, ffn_key, None, int)
    context = number(config, "max_position_embeddings", max_context, int)
    theta, scaling = read_rope(config, context)
    window, window_layers = windows
    spec = ModelSpec(
        hidden_size=number(config, "hidden_size", None, int),
        num_layers=num_layers_of(config),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        vocab_size=number(config, "vocab_size", None, int),
        max_context=context,
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(config, "rms_norm_eps", norm_eps, float),
        delay=0,
        tied_embeddings=number(config, "tie_word_embeddings", False, bool),
        sliding_window=window,
        window_layers=window_layers,
        own_head_dim=number(config, "head_dim", head_dim or 0, int) or None,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        attention_sinks=attention_sinks,
        experts=experts,
    )
    return replace(spec, num_lanes=lanes_of(spec, 0 if quantisation is None else quantisation.lane_columns))


def num_layers_of(config: Config) -> int:
    """The number of layers, or one more than ModelSpec takes."""
    return min(int(number(config, "num_hidden_layers", None, int)), MAX_LAYERS + 1)


def rounded_lanes(spec: ModelSpec, columns: int) -> int:
    """Lanes of a model whose 16-bit weights are rounded at the start in groups of `columns`: those of a folder published so.

    The smallest keep theirs, which need not be whole groups: each lane is rounded by itself, and its last group may be smaller.
    """
    return lanes_of(spec, columns) if _layer_weights(spec) >= SMALL_LAYER else spec.num_lanes


def lanes_of(spec: ModelSpec, columns: int = 0) -> int:
    """Lanes of a dense model: the most, of 1, 2, 4 and 8, that divide its heads, KV heads and FFN columns; of quantised weights
    those and attention's into whole groups of `columns`.

    Fewer for models so small that on a GPU the ways between products, of which lanes have more, cost more than their weights: a
    lane then has at least LANE_WEIGHTS of each layer that a token reads. Of quantised weights it has at least CODED_LANE_COLUMNS
    of attention's output, so that none of the kernel's matrix warps is without some. Not for the smallest, for CPU ranks.
    """
    attention, layer_weights, lanes = spec.num_heads * spec.head_dim, _layer_weights(spec), MOST_LANES
    while lanes > 1 and (
        any(size % lanes for size in (spec.num_heads, spec.num_kv_heads, spec.intermediate_size))
        or any(columns and width % (lanes * columns) for width in (attention, spec.intermediate_size))
        or (columns and layer_weights >= SMALL_LAYER and attention < lanes * CODED_LANE_COLUMNS)
        or SMALL_LAYER <= layer_weights < lanes * LANE_WEIGHTS
    ):
        lanes //= 2
    return lanes


def qwen_windows(config: Config) -> tuple[int | None, tuple[int, ...]]:
    """Sliding window and the layers that have it, as Qwen2's and Qwen3's configs say. Raises ConfigError."""
    num_layers = num_layers_of(config)
    types = config.get("layer_types")
    if not number(config, "use_sliding_window", False, bool) or config.get("sliding_window") is None:
        if types is not None and types != ["full_attention"] * num_layers:
            raise ConfigError(f"layer_types {short(types)} must all be full_attention without use_sliding_window")
        return None, ()
    first = number(config, "max_window_layers", 28, int)
    layers = tuple(range(min(max(first, 0), num_layers), num_layers))
    if types is not None:
        kinds = ["sliding_attention" if layer in layers else "full_attention" for layer in range(num_layers)]
        if types != kinds:
            raise ConfigError(f"layer_types {short(types)} contradicts max_window_layers {first}")
    return int(number(config, "sliding_window", None, int)), layers


def stored_names(spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """transformers' names of all tensors, and how lanes lie in them."""
    return {name: stored_name(spec, name) for name in layouts}


def names_beside(ffn: Callable[[str], StoredTensorName], spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """The same, but for the tensors of an FFN of another kind, whose names `ffn` gives."""
    others = {name: layout for name, layout in layouts.items() if ".feed_forward." not in name}
    return dict(stored_names(spec, others)) | {name: ffn(name) for name in layouts if name not in others}


def stored_name(spec: ModelSpec, name: str) -> StoredTensorName:
    """Where one of the tensors is."""
    if name in _OUTER:
        return StoredTensorName(_OUTER[name])
    if name.endswith(SINKS):
        return StoredTensorName(f"{name.removesuffix(SINKS)}.self_attn.sinks", is_whole=True)
    model, layers, layer_idx, *module, kind = name.split(".")
    prefix, part = f"{model}.{layers}.{layer_idx}", module[-1]
    if part in _NORMS:
        return StoredTensorName(f"{prefix}.{_NORMS[part]}.{kind}")
    theirs = f"self_attn.{_ATTENTION[part]}" if part in _ATTENTION else f"mlp.{FFN[part]}"
    return StoredTensorName(
        f"{prefix}.{theirs}.{kind}",
        is_whole=True,
        has_columns=part in _COLUMNS and kind == "weight",
        half_pairs=spec.head_dim if part in _TURNED else 0,
    )


def _layer_weights(spec: ModelSpec) -> int:
    """Weights of a layer that a token reads."""
    ffn = 3 * spec.intermediate_size * spec.num_ffns_read
    return spec.hidden_size * (2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim + ffn)
