"""Qwen3-Next, Qwen3-Coder-Next, Qwen3.5, 3.6 and 3.8: gated delta nets, and gated attention in every fourth layer.

With experts and a shared one, or dense. Files of Qwen3.5 and later hold a model that also sees; its text is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kog_dist.errors import ConfigError
from kog_dist.model.experts import ExpertsSpec
from kog_dist.model.families import dense
from kog_dist.model.families.dense import CODED_LANE_COLUMNS, FFN, HEAD, IGNORED, KEYS, LANE_WEIGHTS, MOST_LANES, SMALL_LAYER
from kog_dist.model.families.fields import Config, number, read_rope
from kog_dist.model.families.qwen3_moe import num_experts
from kog_dist.model.families.stored import Family, Names, StoredTensorName
from kog_dist.model.formats.quantisation import read_quantisation
from kog_dist.model.formats.row_parts import RowPart
from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn, FfnKind, LayerSpec, MixerKind, Norm
from kog_dist.model.layout import TensorLayout
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short

_LINEAR, _FULL = "linear_attention", "full_attention"
_KEYS: Final = frozenset(
    """layer_types full_attention_interval partial_rotary_factor linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim
    linear_num_key_heads linear_num_value_heads mtp_num_hidden_layers mtp_use_dedicated_embeddings""".split()
)
_OF_EXPERTS: Final = frozenset(
    """moe_intermediate_size shared_expert_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob
    mlp_only_layers decoder_sparse_step""".split()
)
_OWN: Final[Mapping[str, tuple[object, ...]]] = {
    "attn_output_gate": (True,),
    "mamba_ssm_dtype": ("float32",),
    "output_gate_type": ("swish", "silu"),
    "use_qk_norm": (True,),
}
# Of the wrapper: what it says of images, and of the model as a whole.
_OF_MROPE: Final = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
_FROM_OUTSIDE: Final = ("quantization_config", "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")

_OF_MODULES: Final = ("modules_to_not_convert", "ignored_layers", "ignore")  # lists of a quantization_config


def text_of(config: Config) -> Config:
    """What a config says of the text, in one object; rotary sections of images, which text has not, and the part of a head that
    rotates are out of the rotary parameters. Raises ConfigError.
    """
    inner = config.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"text_config must be an object, got {short(inner)}")
    text = dict(config if inner is None else inner)
    if inner is not None:
        text |= {key: config[key] for key in _FROM_OUTSIDE if config.get(key) is not None}
        text["model_type"] = config["model_type"]
        if "quantization_config" in text:
            text["quantization_config"] = _of_text(text["quantization_config"])
    for key in ("rope_parameters", "rope_scaling"):
        raw = text.get(key)
        if not isinstance(raw, Mapping):
            continue
        of_rope = raw.get("partial_rotary_factor")
        if of_rope is not None and text.get("partial_rotary_factor") not in (None, of_rope):
            other = short(text["partial_rotary_factor"])
            raise ConfigError(f"{key}.partial_rotary_factor {short(of_rope)} contradicts partial_rotary_factor {other}")
        if of_rope is not None:
            text["partial_rotary_factor"] = of_rope
        rest = {name: value for name, value in raw.items() if name not in _OF_MROPE}
        text[key] = {name: ("default" if value == "mrope" else value) for name, value in rest.items()} or None
    return text


def _of_text(quantisation: object) -> object:
    """What a wrapper says of codes, with the names that modules of a text alone have."""
    if not isinstance(quantisation, Mapping):
        return quantisation
    named = {key: quantisation[key] for key in _OF_MODULES if isinstance(quantisation.get(key), list)}
    return {**quantisation} | {
        key: [name.replace("language_model.", "") if isinstance(name, str) else name for name in names]
        for key, names in named.items()
    }


def read_config(config: Config) -> ModelSpec:
    """The spec of a Qwen3NextForCausalLM, or of the text of a Qwen3_5(Moe)ForConditionalGeneration. Raises ConfigError."""
    config = text_of(config)
    quantisation = read_quantisation(config)
    if quantisation is not None and quantisation.is_of_experts:
        raise ConfigError(f"quantization_config: quant_method {quantisation.method} is supported for gpt_oss alone")
    num_layers = dense.num_layers_of(config)
    context = number(config, "max_position_embeddings", 32_768, int)
    theta, scaling = read_rope(config, context)
    norm = Norm(number(config, "rms_norm_eps", 1e-6, float), adds_one=True)
    attention, net = _attention(config), _delta_net(config)
    kinds = _layer_kinds(config, num_layers)
    layers = [LayerSpec(attention if kind == _FULL else net, _ffn(config, layer), norm) for layer, kind in enumerate(kinds)]
    spec = ModelSpec.of_layers(
        layers,
        num_layers=num_layers,
        hidden_size=number(config, "hidden_size", None, int),
        vocab_size=number(config, "vocab_size", None, int),
        max_context=context,
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=number(config, "tie_word_embeddings", False, bool),
    )
    return replace(spec, num_lanes=lanes_of(spec, 0 if quantisation is None else quantisation.lane_columns))


def _attention(config: Config) -> AttentionMixer:
    heads, head_dim = number(config, "num_attention_heads", None, int), number(config, "head_dim", 256, int)
    factor = number(config, "partial_rotary_factor", 0.25, float)
    rotary = int(head_dim * factor)
    if not 0 < factor <= 1 or rotary < 2 or rotary % 2:
        raise ConfigError(f"partial_rotary_factor {factor} of head_dim {head_dim} must leave an even number of values, 2 or more")
    kv_heads = number(config, "num_key_value_heads", 4 if config["model_type"] in DENSE_TYPES else 2, int)
    return AttentionMixer(heads, kv_heads, head_dim, qk_norm=True, gated=True, rotary_dim=0 if rotary == head_dim else rotary)


def _delta_net(config: Config) -> DeltaNet:
    def size(key: str, default: int, most: int) -> int:
        found = int(number(config, key, default, int))
        if not 1 <= found <= most:
            raise ConfigError(f"{key} must be between 1 and {most}, got {found}")
        return found

    return DeltaNet(
        size("linear_num_key_heads", 16, 4096),
        size("linear_num_value_heads", 32, 4096),
        size("linear_key_head_dim", 128, 4096),
        size("linear_value_head_dim", 128, 4096),
        size("linear_conv_kernel_dim", 4, 64),
    )


def _layer_kinds(config: Config, num_layers: int) -> list[str]:
    """Of each layer whether it is a delta net or attention. Raises ConfigError."""
    kinds = config.get("layer_types")
    if kinds is None:
        every = number(config, "full_attention_interval", 4, int)
        if every < 1:
            raise ConfigError(f"full_attention_interval must be at least 1, got {every}")
        return [_LINEAR if (layer + 1) % every else _FULL for layer in range(max(num_layers, 0))]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in (_LINEAR, _FULL) for kind in kinds):
        raise ConfigError(f"layer_types {short(kinds)} must be {_LINEAR} or {_FULL} for each of {num_layers} layers")
    return kinds


def _ffn(config: Config, layer: int) -> FfnKind:
    if config["model_type"] in DENSE_TYPES:
        return Ffn(number(config, "intermediate_size", None, int))
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(type(one) is not int for one in plain):
        raise ConfigError(f"mlp_only_layers must be a list of layers, got {short(plain)}")
    step = number(config, "decoder_sparse_step", 1, int)
    if step < 1:
        raise ConfigError(f"decoder_sparse_step must be at least 1, got {step}")
    if layer in plain or (layer + 1) % step:
        return Ffn(number(config, "intermediate_size", None, int))
    is_next, is_normalised = config["model_type"] == "qwen3_next", number(config, "norm_topk_prob", True, bool)
    if not is_normalised and not is_next:
        raise ConfigError(f"norm_topk_prob is False, which {config['model_type']} does not have")
    per_token = number(config, "num_experts_per_tok", 10 if is_next else 8, int)
    choice = ExpertsSpec(num_experts=num_experts(config), per_token=per_token, is_normalised=is_normalised)
    shared = number(config, "shared_expert_intermediate_size", 512, int)
    if shared < 1:
        raise ConfigError(f"shared_expert_intermediate_size must be at least 1, got {shared}")
    return Experts(number(config, "moe_intermediate_size", 512, int), choice, shared)


def lanes_of(spec: ModelSpec, columns: int = 0) -> int:
    """Lanes of such a model: as `dense.lanes_of`, but neighbouring lanes may have the same KV head."""
    layer_weights, lanes = _layer_weights(spec), MOST_LANES
    while lanes > 1 and (
        any(size % lanes for part in spec.kinds for size in part.divided().values())
        or (spec.num_kv_heads % lanes and lanes % spec.num_kv_heads)
        or any(columns and width % (lanes * columns) for part in spec.kinds for width in _widths(part))
        or (columns and layer_weights >= SMALL_LAYER and min(map(_out_columns, spec.kinds)) < lanes * CODED_LANE_COLUMNS)
        or SMALL_LAYER <= layer_weights < lanes * LANE_WEIGHTS
    ):
        lanes //= 2
    return lanes


def _layer_weights(spec: ModelSpec) -> int:
    """Those of the smallest layer that a token reads."""
    return min(layer.mixer.num_values(spec.hidden_size) + layer.ffn.num_read(spec.hidden_size) for layer in spec.layers)


def _widths(part: MixerKind) -> tuple[int, ...]:
    """Columns of matrices that lanes divide among them."""
    match part:
        case AttentionMixer():
            return (part.num_heads * part.head_dim,)
        case DeltaNet():
            return (part.values,)
        case Experts():
            return (part.width, part.shared_width)
        case Ffn():
            return (part.width,)
        case _:
            return ()


def _out_columns(part: MixerKind) -> int:
    """Those of a mixer's output; of an FFN no limit."""
    return _widths(part)[0] if isinstance(part, AttentionMixer | DeltaNet) else 1 << 62


# ---- names ----
_DELTA = {"wz": "in_proj_z.weight", "wa": "in_proj_a.weight", "wb": "in_proj_b.weight", "wo": "out_proj.weight"}
_SMALL = {"decay": "A_log", "dt_bias": "dt_bias", "norm": "norm.weight"}
_ROWS = {"wq": "query", "wk": "key", "wv": "value", "wz": "z", "wa": "a", "wb": "b"}


def stored_names(spec: ModelSpec, layouts: Mapping[str, TensorLayout]) -> Names:
    """transformers' names; of what files hold within other tensors those of `parts`."""
    return {name: _stored(spec, name) for name in layouts}


def _stored(spec: ModelSpec, name: str) -> StoredTensorName:
    if ".delta." in name:
        return _of_delta(name)
    if ".feed_forward." in name:
        return _of_ffn(name)
    if ".attention." not in name:
        return dense.stored_name(spec, name)
    model, layers, layer_idx, _, part, kind = name.split(".")
    mixer = next(one for one in spec.kinds if isinstance(one, AttentionMixer))
    turned = mixer.rotary_dim or mixer.head_dim
    if part in ("wq", "wgate"):
        what, pairs = ("query", mixer.head_dim) if part == "wq" else ("gate", 0)
        theirs = f"{model}.{layers}.{layer_idx}.self_attn.q_proj.{kind}[{what}]"
        return StoredTensorName(theirs, is_whole=True, half_pairs=pairs, turned=turned if pairs else 0)
    plain = dense.stored_name(spec, name)
    copies = max(spec.num_lanes // mixer.num_kv_heads, 1) if part in ("wk", "wv") else 1
    return replace(plain, copies=copies, turned=turned if plain.half_pairs else 0)


def _of_delta(name: str) -> StoredTensorName:
    model, layers, layer_idx, _, part, *_ = name.split(".")
    prefix = f"{model}.{layers}.{layer_idx}.linear_attn"
    if part in _SMALL:
        return StoredTensorName(f"{prefix}.{_SMALL[part]}", is_whole=part != "norm")
    if part.startswith("conv_"):
        return StoredTensorName(f"{prefix}.conv1d.weight[{_ROWS[f'w{part[-1]}']}]", is_whole=True)
    if part in _DELTA:
        return StoredTensorName(f"{prefix}.{_DELTA[part]}", is_whole=True, has_columns=part == "wo")
    return StoredTensorName(f"{prefix}.in_proj_qkv.weight[{_ROWS[part]}]", is_whole=True)


def _of_ffn(name: str) -> StoredTensorName:
    model, layers, layer_idx, _, *module, part, kind = name.split(".")
    prefix = f"{model}.{layers}.{layer_idx}.mlp"
    if part in ("router", "shared_gate"):
        return StoredTensorName(f"{prefix}.{'gate' if part == 'router' else 'shared_expert_gate'}.{kind}")
    where = {"shared": "shared_expert."}.get(module[0], f"experts.{module[-1]}.") if module else ""
    return StoredTensorName(f"{prefix}.{where}{FFN[part]}.{kind}", is_whole=True, has_columns=part == "w2")


def parts(spec: ModelSpec) -> dict[str, RowPart]:
    """Tensors that lie within others in files of Qwen3.5 and later."""
    return _parts(spec, _apart)


def parts_of_next(spec: ModelSpec) -> dict[str, RowPart]:
    """The same of Qwen3-Next, which has all projections of a delta net in two tensors, in groups for each key head."""
    return _parts(spec, _in_groups)


def _parts(spec: ModelSpec, of_delta: Callable[[int, DeltaNet, str], dict[str, RowPart]]) -> dict[str, RowPart]:
    d, found = spec.hidden_size, dict[str, RowPart]()
    for layer_idx, layer in enumerate(spec.layers):
        prefix = f"model.layers.{layer_idx}"
        if isinstance(layer.mixer, AttentionMixer):
            name, dim, heads = f"{prefix}.self_attn.q_proj.weight", layer.mixer.head_dim, layer.mixer.num_heads
            for number_, what in enumerate(("query", "gate")):
                found[f"{name}[{what}]"] = RowPart(name, (2 * heads * dim, d), dim, number_ * dim, 2 * dim, heads)
        elif isinstance(layer.mixer, DeltaNet):
            net, conv = layer.mixer, f"{prefix}.linear_attn.conv1d.weight"
            found |= of_delta(d, net, f"{prefix}.linear_attn")
            for what, (first, count) in _channels(net).items():
                found[f"{conv}[{what}]"] = RowPart(conv, (net.channels, 1, net.conv_width), count, first)
        if isinstance(layer.ffn, Experts):
            found |= _of_stacks(d, layer.ffn, f"{prefix}.mlp.experts")
    return found


def _channels(net: DeltaNet) -> dict[str, tuple[int, int]]:
    """First and number of queries, keys and values where they stand one behind the other."""
    return {"query": (0, net.keys), "key": (net.keys, net.keys), "value": (2 * net.keys, net.values)}


def _apart(d: int, net: DeltaNet, prefix: str) -> dict[str, RowPart]:
    name = f"{prefix}.in_proj_qkv.weight"
    return {f"{name}[{what}]": RowPart(name, (net.channels, d), count, first) for what, (first, count) in _channels(net).items()}


def _in_groups(d: int, net: DeltaNet, prefix: str) -> dict[str, RowPart]:
    """Under the names that files of Qwen3.5 have for the same."""
    heads, groups = net.num_value_heads // net.num_key_heads, net.num_key_heads
    qkvz, ba = f"{prefix}.in_proj_qkvz.weight", f"{prefix}.in_proj_ba.weight"
    values = heads * net.value_dim
    stride, found, first = 2 * net.key_dim + 2 * values, dict[str, RowPart](), 0
    names = (f"{prefix}.in_proj_qkv.weight[{what}]" for what in ("query", "key", "value"))
    for name, count in zip((*names, f"{prefix}.in_proj_z.weight"), (net.key_dim, net.key_dim, values, values), strict=True):
        found[name] = RowPart(qkvz, (groups * stride, d), count, first, stride, groups)
        first += count
    for number_, what in enumerate("ba"):
        found[f"{prefix}.in_proj_{what}.weight"] = RowPart(
            ba, (2 * net.num_value_heads, d), heads, number_ * heads, 2 * heads, groups
        )
    return found


def _of_stacks(d: int, experts: Experts, prefix: str) -> dict[str, RowPart]:
    """Of experts in one tensor for all, gate rows of each before its up rows; under the names of files with one tensor each."""
    count, width, found = experts.choice.num_experts, experts.width, dict[str, RowPart]()
    gate_up, down = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    for expert in range(count):
        for number_, what in enumerate(("gate_proj", "up_proj")):
            first = (2 * expert + number_) * width
            found[f"{prefix}.{expert}.{what}.weight"] = RowPart(gate_up, (count, 2 * width, d), width, first)
        found[f"{prefix}.{expert}.down_proj.weight"] = RowPart(down, (count, d, width), d, expert * d)
    return found


DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
_STARTS = ("model.visual.", "visual.", "mtp.", "model.mtp.")


def _rounded_lanes(spec: ModelSpec, columns: int) -> int:
    """As `dense.rounded_lanes`; with experts lanes stay as they are."""
    is_small = _layer_weights(spec) < SMALL_LAYER
    return spec.num_lanes if is_small or any(isinstance(kind, Experts) for kind in spec.kinds) else lanes_of(spec, columns)


def _family(model_types: tuple[str, ...], of_parts: Callable[[ModelSpec], dict[str, RowPart]], keys: frozenset[str]) -> Family:
    return Family(
        model_types, read_config, stored_names, IGNORED, HEAD, keys=KEYS | _KEYS | keys, own=_OWN, has_experts=bool(keys),
        parts=of_parts, prepared=text_of, rounded_lanes=_rounded_lanes, renamed=(("model.language_model.", "model."),),
        skipped=_STARTS,
    )  # fmt: skip


NEXT = _family(("qwen3_next",), parts_of_next, _OF_EXPERTS)
DENSE = _family(DENSE_TYPES, parts, frozenset())
WITH_EXPERTS = _family(("qwen3_5_moe", "qwen3_5_moe_text"), parts, _OF_EXPERTS)
