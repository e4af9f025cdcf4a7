"""Names, shapes and lane parts of every tensor of a model, as a published Laneformer checkpoint has them.

All of the engine knows tensors by these names and shapes. How files of other families hold them: `families/`. Neither files nor
NumPy here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from kog_dist.model.spec import HeadType, ModelSpec

EMBEDDING = "model.tok_embeddings.weight"
SINKS = ".attention.sinks"
EXPERTS = ".feed_forward.experts."  # within the names of all that one expert has


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Shape of a tensor and how its rows (first dimension) are divided among the lanes.

    `parts[l]` is (first, one past last) row of lane l. A tensor that is not divided has one part, all its rows; lane 0 checks
    it. Every row is in exactly one part: if each lane's rank checks the parts of the lane, every byte is checked exactly once.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]

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
    prefix = layer_prefix(layer_idx).rstrip(".")
    if spec.experts is None:
        return [f"{prefix}.feed_forward."]
    return [f"{prefix}{EXPERTS}{expert}." for expert in range(spec.experts.num_experts)]


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
    """Whether a tensor is one of the matrices of a layer, lane first: all but embedding, LM head, norms and biases."""
    return name.startswith("model.layers.") and len(layouts[name].shape) == 3


@lru_cache(maxsize=4)
def tensor_layouts(spec: ModelSpec) -> Mapping[str, TensorLayout]:
    """Every tensor of a checkpoint of `spec`, in the order of use. Kept: models with experts have tens of thousands."""
    return MappingProxyType(dict(_layouts(spec)))


def _layouts(spec: ModelSpec) -> Iterator[tuple[str, TensorLayout]]:
    lanes, d, vocab = spec.num_lanes, spec.hidden_size, spec.vocab_size
    q_rows, kv_rows, ffn = spec.lane_heads * spec.head_dim, spec.lane_kv_heads * spec.head_dim, spec.lane_ffn
    one_row_per_lane = tuple((lane, lane + 1) for lane in range(lanes))
    vocab_parts = tuple(spec.vocab_slice(lane) for lane in range(lanes))

    def lane_first(rows: int, columns: int) -> TensorLayout:
        return TensorLayout((lanes, rows, columns), one_row_per_lane)

    def norm(stem: str) -> tuple[str, TensorLayout]:
        name = norm_name(spec, stem)
        if name.endswith(".scale"):
            return name, TensorLayout((lanes, d), one_row_per_lane)
        return name, TensorLayout((d,), ((0, d),))

    yield EMBEDDING, TensorLayout((vocab, d), vocab_parts)
    for layer_idx in range(spec.num_layers):
        prefix = layer_prefix(layer_idx)
        yield norm(f"{prefix}attention_norm")
        yield f"{prefix}attention.wq.weight", lane_first(q_rows, d)
        yield f"{prefix}attention.wk.weight", lane_first(kv_rows, d)
        yield f"{prefix}attention.wv.weight", lane_first(kv_rows, d)
        yield f"{prefix}attention.wo.weight", lane_first(d, q_rows)
        if spec.qkv_bias:
            for name, rows in (("wq", q_rows), ("wk", kv_rows), ("wv", kv_rows)):
                yield f"{prefix}attention.{name}.bias", TensorLayout((lanes, rows), one_row_per_lane)
        if spec.out_bias:
            yield f"{prefix}attention.wo.bias", TensorLayout((d,), ((0, d),))
        if spec.attention_sinks:
            yield f"{prefix}attention.sinks", TensorLayout((lanes, spec.lane_heads), one_row_per_lane)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}attention.{name}.weight", TensorLayout((spec.head_dim,), ((0, spec.head_dim),))
        yield norm(f"{prefix}ffn_norm")
        if spec.experts is not None:
            num_experts = spec.experts.num_experts
            yield f"{prefix}feed_forward.router.weight", TensorLayout((num_experts, d), ((0, num_experts),))
            if spec.experts.router_bias:
                yield f"{prefix}feed_forward.router.bias", TensorLayout((num_experts,), ((0, num_experts),))
        for ffn_prefix in ffn_prefixes(spec, layer_idx):
            yield f"{ffn_prefix}w1.weight", lane_first(ffn, d)
            yield f"{ffn_prefix}w3.weight", lane_first(ffn, d)
            yield f"{ffn_prefix}w2.weight", lane_first(d, ffn)
            if spec.experts is not None and spec.experts.bias:
                for name in ("w1", "w3"):
                    yield f"{ffn_prefix}{name}.bias", TensorLayout((lanes, ffn), one_row_per_lane)
                yield f"{ffn_prefix}w2.bias", TensorLayout((d,), ((0, d),))
    yield norm("model.norm")
    if spec.head_type is HeadType.VOCAB_PARALLEL:
        yield head_name(spec), lane_first(vocab // lanes, d)
    elif not spec.tied_embeddings:
        columns = d * (lanes if spec.head_type is HeadType.LANE else 1)
        yield head_name(spec), TensorLayout((vocab, columns), vocab_parts)
