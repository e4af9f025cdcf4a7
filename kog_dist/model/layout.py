"""Names, shapes and lane parts of every tensor of a model, as a published Laneformer checkpoint has them.

All of the engine knows tensors by these names and shapes. How files of other families hold them: `families/`. Neither files nor
NumPy here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.spec import HeadType, ModelSpec
from kog_dist.records import dataclass

EMBEDDING = "model.tok_embeddings.weight"
SINKS = ".attention.sinks"
EXPERTS = ".feed_forward.experts."  # within the names of all that one expert has
SHARED = ".feed_forward.shared."  # and of those of the FFN that stands beside experts
NETS, NET_OUTPUTS = ".delta.", ".wo.weight"  # within the names of all that a delta net has; the end of its last matrix's
# Ends of names of matrices that stay as they are whatever the others are rounded to: few values, which much depends on.
_UNROUNDED = (".delta.wa.weight", ".delta.wb.weight", ".delta.conv_q", ".delta.conv_k", ".delta.conv_v")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape of a tensor and how its rows (first dimension) are divided among the lanes.

    `parts[l]` is (first, one past last) row of lane l. A tensor that is not divided has one part, all its rows; lane 0 checks
    it. Every row is in exactly one part: if each lane's rank checks the parts of the lane, every byte is checked exactly once.
    `has_lanes`: the first dimension is lanes, of which so many neighbouring ones as `sharing` says have equal rows.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    has_lanes: bool = field(default=False, repr=False)
    sharing: int = field(default=1, repr=False)

    @property
    def drawn_shape(self) -> tuple[int, ...]:
        """Of random weights, where lanes that share rows have them once."""
        return (self.shape[0] // self.sharing, *self.shape[1:])

    def of_all_lanes(self, drawn: Any) -> Any:
        """The tensor (`shape`) of an array of `drawn_shape`."""
        return drawn if self.sharing == 1 else drawn.repeat(self.sharing, 0)

    @property
    def num_values(self) -> int:
        """Elements of the whole tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def values_per_row(self) -> int:
        """Elements of one row of the first dimension."""
        return self.num_values // self.shape[0]


def layer_prefix(layer_idx: int) -> str:
    """Start of the names of a layer's tensors."""
    return f"model.layers.{layer_idx}."


def ffn_prefixes(spec: ModelSpec, layer_idx: int) -> list[str]:
    """Start of the names of the tensors of a layer's FFN, or of each of its experts."""
    prefix, ffn = layer_prefix(layer_idx).rstrip("."), spec.layers[layer_idx].ffn
    if isinstance(ffn, Experts):
        return [f"{prefix}{EXPERTS}{expert}." for expert in range(ffn.choice.num_experts)]
    return [f"{prefix}.feed_forward."]


def norm_name(spec: ModelSpec, stem: str) -> str:
    """Full name of a norm's tensor: `.weight` (D) shared by the lanes, or `.scale` (L, D). `stem` has no trailing dot."""
    shared = spec.shared_norm_scale or (stem == "model.norm" and spec.pre_norm_lane_agg)
    return f"{stem}.{'weight' if shared else 'scale'}"


def head_name(spec: ModelSpec) -> str:
    """Name of the tensor that holds the LM head's rows; the embedding's name if they are tied."""
    if spec.tied_embeddings:
        return EMBEDDING
    return "lm_head.linear.weight" if spec.head_type is HeadType.LANE else "lm_head.weight"


def is_layer_matrix(layouts: Mapping[str, TensorLayout], name: str) -> bool:
    """Whether a tensor is one of the matrices of a layer, lane first: all but embedding, LM head, norms and biases; and but the
    small ones of delta nets.
    """
    return name.startswith("model.layers.") and len(layouts[name].shape) == 3 and not name.endswith(_UNROUNDED)


@lru_cache(maxsize=4)
def tensor_layouts(spec: ModelSpec) -> Mapping[str, TensorLayout]:
    """Every tensor of a checkpoint of `spec`, in the order of use. Kept: models with experts have tens of thousands."""
    return MappingProxyType(dict(_layouts(spec)))


def _layouts(spec: ModelSpec) -> Iterator[tuple[str, TensorLayout]]:
    lanes, d, vocab = spec.num_lanes, spec.hidden_size, spec.vocab_size
    yield EMBEDDING, TensorLayout((vocab, d), tuple(spec.vocab_slice(lane) for lane in range(lanes)))
    for layer_idx, layer in enumerate(spec.layers):
        prefix = layer_prefix(layer_idx)
        for part, norm in ((layer.mixer, "attention_norm"), (layer.ffn, "ffn_norm")):
            kind = KINDS[type(part)]
            yield _norm(spec, f"{prefix}{norm}")
            yield from kind.tensors(spec, part, f"{prefix}{kind.module}.")
    yield _norm(spec, "model.norm")
    if spec.head_type is HeadType.VOCAB_PARALLEL:
        yield head_name(spec), lane_first(spec, vocab // lanes, d)
    elif not spec.tied_embeddings:
        columns = d * (lanes if spec.head_type is HeadType.LANE else 1)
        yield head_name(spec), TensorLayout((vocab, columns), tuple(spec.vocab_slice(lane) for lane in range(lanes)))


def lane_first(spec: ModelSpec, *shape: int, sharing: int = 1) -> TensorLayout:
    """Of a tensor whose first dimension is lanes."""
    parts = tuple((lane, lane + 1) for lane in range(spec.num_lanes))
    return TensorLayout((spec.num_lanes, *shape), parts, has_lanes=True, sharing=sharing)


def shared(*shape: int) -> TensorLayout:
    """Of one that is not divided."""
    return TensorLayout(shape, ((0, shape[0]),))


def _norm(spec: ModelSpec, stem: str) -> tuple[str, TensorLayout]:
    name = norm_name(spec, stem)
    return name, lane_first(spec, spec.hidden_size) if name.endswith(".scale") else shared(spec.hidden_size)


def _attention(spec: ModelSpec, mixer: AttentionMixer, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    d, heads, kv_heads = spec.hidden_size, mixer.num_heads // spec.num_lanes, mixer.lane_kv_heads(spec.num_lanes)
    rows = {"wq": heads * mixer.head_dim, "wk": kv_heads * mixer.head_dim, "wv": kv_heads * mixer.head_dim}
    rows |= {"wgate": heads * mixer.head_dim} if mixer.gated else {}
    sharing = dict.fromkeys(("wk", "wv"), mixer.sharing_lanes(spec.num_lanes))
    for name, count in rows.items():
        yield f"{prefix}{name}.weight", lane_first(spec, count, d, sharing=sharing.get(name, 1))
    yield f"{prefix}wo.weight", lane_first(spec, d, heads * mixer.head_dim)
    if mixer.qkv_bias:
        for name, count in rows.items():
            yield f"{prefix}{name}.bias", lane_first(spec, count, sharing=sharing.get(name, 1))
    if mixer.out_bias:
        yield f"{prefix}wo.bias", shared(d)
    if mixer.sinks:
        yield f"{prefix}sinks", lane_first(spec, heads)
    if mixer.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}{name}.weight", shared(mixer.head_dim)


def _delta(spec: ModelSpec, net: DeltaNet, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    d, lanes, heads = spec.hidden_size, spec.num_lanes, net.num_value_heads // spec.num_lanes
    rows = {
        "wq": net.keys,
        "wk": net.keys,
        "wv": net.values,
        "wz": net.values,
        "wa": net.num_value_heads,
        "wb": net.num_value_heads,
    }
    for name, count in rows.items():
        yield f"{prefix}{name}.weight", lane_first(spec, count // lanes, d)
    for name in "qkv":
        yield f"{prefix}conv_{name}", lane_first(spec, rows[f"w{name}"] // lanes, net.conv_width)
    for name in ("decay", "dt_bias"):
        yield f"{prefix}{name}", lane_first(spec, heads)
    yield f"{prefix}norm.weight", shared(net.value_dim)
    yield f"{prefix}wo.weight", lane_first(spec, d, net.values // lanes)


def _dense(spec: ModelSpec, ffn: Ffn, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    yield from _ffn(spec, ffn.width, prefix)


def _ffn(spec: ModelSpec, width: int, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    d, columns = spec.hidden_size, width // spec.num_lanes
    rows = lane_first(spec, columns, d)
    yield f"{prefix}w1.weight", rows
    yield f"{prefix}w3.weight", rows
    yield f"{prefix}w2.weight", lane_first(spec, d, columns)


def _experts(spec: ModelSpec, experts: Experts, prefix: str) -> Iterator[tuple[str, TensorLayout]]:
    choice = experts.choice
    yield f"{prefix}router.weight", shared(choice.num_experts, spec.hidden_size)
    if choice.router_bias:
        yield f"{prefix}router.bias", shared(choice.num_experts)
    of_expert = [*_ffn(spec, experts.width, "")]  # made once: models have tens of thousands of experts
    if choice.bias:
        of_expert += [(f"{name}.bias", lane_first(spec, experts.width // spec.num_lanes)) for name in ("w1", "w3")]
        of_expert.append(("w2.bias", shared(spec.hidden_size)))
    for expert in range(choice.num_experts):
        start = f"{prefix.removesuffix('.feed_forward.')}{EXPERTS}{expert}."
        for name, layout in of_expert:
            yield start + name, layout
    if experts.shared_width:
        yield f"{prefix}shared_gate.weight", shared(1, spec.hidden_size)
        yield from _ffn(spec, experts.shared_width, f"{prefix}shared.")


class KindTensors(NamedTuple):
    """The tensors of a kind of mixer or FFN.

    `module`: what their names within a layer begin with. `tensors(spec, kind, prefix)` gives names and layouts. `inputs`: those
    that stand one below the other in the matrix that a mixer multiplies its input with, `outputs` in that of its output; of FFNs,
    which are stacks of them, none.
    """

    module: str
    tensors: Callable[[ModelSpec, Any, str], Iterator[tuple[str, TensorLayout]]]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("wo",)


KINDS: dict[type, KindTensors] = {
    AttentionMixer: KindTensors("attention", _attention, ("wq", "wk", "wv", "wgate")),
    DeltaNet: KindTensors("delta", _delta, ("wq", "wk", "wv", "wz", "wa", "wb")),
    Ffn: KindTensors("feed_forward", _dense),
    Experts: KindTensors("feed_forward", _experts),
}


def mixer_tensors(spec: ModelSpec, layer_idx: int) -> Mapping[str, TensorLayout]:
    """All tensors of a layer's mixer, by their full names."""
    mixer = spec.layers[layer_idx].mixer
    kind = KINDS[type(mixer)]
    return dict(kind.tensors(spec, mixer, f"{layer_prefix(layer_idx)}{kind.module}."))
