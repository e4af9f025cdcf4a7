"""What GGUF files say of models with gated delta nets, and what llama.cpp's converter does to their tensors, undone.

`conversion/qwen.py` of llama.cpp: norms are stored as 1 + w, but for those within delta nets; `A_log` as -exp(A_log); `conv1d`
without its dimension of 1. The architectures qwen35 and qwen35moe have value heads in another order: the first of each key head,
then the second of each, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from kog_dist.late_numpy import Array, NDArray, np
from kog_dist.model.families.delta_nets import parts, parts_of_next
from kog_dist.model.families.fields import Number
from kog_dist.model.formats.row_parts import RowPart
from kog_dist.model.layers import DeltaNet, Experts
from kog_dist.model.spec import ModelSpec
from kog_dist.quoting import short
from kog_dist.records import dataclass

MODEL_TYPES: Final = {"qwen3next": "qwen3_next", "qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
WITH_EXPERTS: Final = ("qwen3next", "qwen35moe")
MODULES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b", "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
# Ends of names that have no module and kind.
ENDS: Final = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
}
# key of the metadata -> key of config.json
_SIZES: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_OF_EXPERTS: Final = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_INNER, _INTERVAL, _RECURRENT, _NEXT_TOKENS = (
    "ssm.inner_size",
    "full_attention_interval",
    "attention.recurrent_layers",
    "nextn_predict_layers",
)
_OF_GROUPS: Final = ("in_proj_qkvz.weight", "in_proj_ba.weight")
_SECTIONS: Final = "rope.dimension_sections"  # of images; text turns as without
READ: Final = frozenset((*_SIZES, *_OF_EXPERTS, _INNER, _INTERVAL, _RECURRENT, _NEXT_TOKENS, _SECTIONS))
# Values that do not change the computation; see `config._CHANGING`.
CHANGING: Final[Mapping[str, tuple[object, ...]]] = {
    "expert_weights_norm": (True,),
    "expert_gating_func": (0, 1),
    "expert_shared_count": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "ssm.v_head_reordered": (True,),
}


class KeyReader(Protocol):
    """Reads a number of the metadata, by its key behind that of the architecture. Raises ValueError."""

    def __call__(self, key: str, kind: type[Number], default: Number | None) -> Number:
        """`default` where there is none; of None it must be there."""


def read_delta_nets(architecture: str, given: Mapping[str, object], number: KeyReader, head_dim: int) -> dict[str, Any]:
    """Keys of config.json that only these models have. Raises ValueError."""
    config: dict[str, Any] = {name: number(key, int, None) for key, name in _SIZES.items()}
    heads, inner = config["linear_num_value_heads"], number(_INNER, int, None)
    if heads < 1 or inner % heads:
        raise ValueError(f"{architecture}.{_INNER} {inner} is not a multiple of ssm.time_step_rank {heads}")
    config["linear_value_head_dim"] = inner // heads
    if architecture in WITH_EXPERTS:
        config |= {name: number(key, int, None) for key, name in _OF_EXPERTS.items()}
    elif given.get("expert_count", 0) != 0:
        raise ValueError(f"{architecture}.expert_count {short(given['expert_count'])} is not supported")
    rotary = number("rope.dimension_count", int, head_dim)
    if not 0 < rotary <= head_dim:
        raise ValueError(f"{architecture}.rope.dimension_count {rotary} must be between 1 and the head size {head_dim}")
    share = rotary / head_dim
    config["partial_rotary_factor"] = share if int(head_dim * share) == rotary else float(np.nextafter(share, 1))
    layers, more = number("block_count", int, None), number(_NEXT_TOKENS, int, 0)
    if not 0 <= more < layers:
        raise ValueError(f"{architecture}.{_NEXT_TOKENS} {more} must be less than block_count {layers}")
    config["num_hidden_layers"] = layers - more
    if _RECURRENT in given:
        kinds = given[_RECURRENT]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(type(kind) in (bool, int) for kind in kinds):
            raise ValueError(
                f"{architecture}.{_RECURRENT} {short(kinds)} must say of each of {layers} layers whether it is recurrent"
            )
        config["layer_types"] = ["linear_attention" if kind else "full_attention" for kind in kinds[: layers - more]]
    else:
        config["full_attention_interval"] = number(_INTERVAL, int, 4)
    return config


def kv_heads(given: Mapping[str, object], key: str) -> object:
    """The one number of KV heads where a list has 0 for each delta net; else what is given."""
    values = given.get(key)
    if not isinstance(values, list) or not values:
        return values
    found = {repr(value) for value in values if value != 0}
    return max(values) if len(found) == 1 and all(type(value) is int for value in values) else values


# ---- tensors ----
class FileRows(NamedTuple):
    """Which rows of a file's tensor a published one has, and in which order. `part`: rows of the tensor as it is published;
    `moved`: for each of these the row of the file, None if they are the same.
    """

    part: RowPart | None = None
    moved: Array | None = None

    def of(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Rows [first, last) of the published tensor as runs of neighbours in the file."""
        for start, stop in ((first, last),) if self.part is None else self.part.runs(first, last):
            if self.moved is None:
                yield start, stop
                continue
            rows = self.moved[start:stop]
            ends = [*(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                yield int(rows[begin]), int(rows[end - 1]) + 1


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a tensor's values: `columns` are the file's, in published order; `undone` takes them back."""

    columns: Array | None = None
    undone: Callable[[NDArray[np.float32]], NDArray[np.float32]] | None = None


def less_one(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of norms."""
    return values - np.float32(1)


def log_of_rate(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """`A_log` of -exp(A_log)."""
    with np.errstate(all="ignore"):  # whether they are finite is checked where all values are
        return np.log(-values.astype(np.float64)).astype(np.float32)


def all_parts(architecture: str, spec: ModelSpec) -> Iterator[tuple[str, RowPart]]:
    """What files hold within other tensors, by the names of the parts: of all tensors that a file may have, one or another."""
    yield from parts(spec).items()
    if architecture == "qwen3next":
        yield from ((name, part) for name, part in parts_of_next(spec).items() if part.tensor.endswith(_OF_GROUPS))
    for layer_idx, layer in enumerate(spec.layers):
        if isinstance(layer.ffn, Experts):
            count, prefix = layer.ffn.choice.num_experts, f"model.layers.{layer_idx}.mlp.experts"
            whole = (count, layer.ffn.width, spec.hidden_size)
            for which in ("gate_proj", "up_proj"):
                for expert in range(count):
                    part = RowPart(f"{prefix}.{which}", whole, layer.ffn.width, expert * layer.ffn.width)
                    yield f"{prefix}.{expert}.{which}.weight", part


def change_of(architecture: str, spec: ModelSpec, name: str) -> tuple[Array | None, Change]:
    """Of a published tensor: which row of the file each of its rows is, None if it is the same one; and what else was done."""
    if ".linear_attn." not in name:
        return None, Change(undone=less_one if name.endswith("norm.weight") else None)
    undone = log_of_rate if name.endswith("A_log") else None
    nets = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, DeltaNet)]
    if architecture == "qwen3next" or not nets or nets[0].num_key_heads == nets[0].num_value_heads:
        return None, Change(undone=undone)
    net = nets[0]
    each = net.num_value_heads // net.num_key_heads
    heads = np.arange(net.num_value_heads).reshape(each, net.num_key_heads).T.reshape(-1)  # of each the file's place
    values = (heads[:, None] * net.value_dim + np.arange(net.value_dim)).reshape(-1)
    if name.endswith("out_proj.weight"):
        return None, Change(columns=values)
    if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        return heads, Change(undone=undone)
    if name.endswith("in_proj_z.weight"):
        return values, Change()
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return np.concatenate([np.arange(2 * net.keys), 2 * net.keys + values]), Change()
    return None, Change()
