"""What a layer is, as data: the kind of its mixer (attention), the kind of its FFN, its norms. Sizes are those of all lanes."""

from __future__ import annotations

from typing import Protocol

from kog_dist.model.experts import ExpertsSpec
from kog_dist.records import dataclass


class MixerKind(Protocol):
    """What every kind of mixer says of itself. What else it takes to add one: docs/layers.md."""

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""

    def divided(self) -> dict[str, int]:
        """What is divided among lanes, with its name: whole numbers of each go to a lane."""


class FfnKind(MixerKind, Protocol):
    """The same of an FFN."""

    def num_read(self, hidden_size: int) -> int:
        """Those parameters that a token reads."""


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Causal softmax attention over keys and values of all positions, or of a window.

    `window`: positions that a token sees, itself included; None: all before it. `qkv_bias` is added to queries, keys and values,
    `out_bias` to the output. `qk_norm`: an RMS norm of every query and key head before it is rotated. `sinks`: one more logit in
    the softmax of each query head. `rotary_dim`: the first values of a head that positions rotate; 0: all. `gated`: the output
    of a query head times the sigmoid of as many values, which are projected as queries are.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    rotary_dim: int = 0
    gated: bool = False

    @property
    def num_rows(self) -> int:
        """Query, key, value and gate rows."""
        return ((1 + self.gated) * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def sharing_lanes(self, num_lanes: int) -> int:
        """Neighbouring lanes that have the same KV head."""
        return max(num_lanes // self.num_kv_heads, 1)

    def lane_kv_heads(self, num_lanes: int) -> int:
        """KV heads of a lane. Where there are fewer than lanes, neighbouring lanes have the same one."""
        return max(self.num_kv_heads // num_lanes, 1)

    def lane_rows(self, num_lanes: int) -> int:
        """`num_rows` of a lane."""
        heads = (1 + self.gated) * self.num_heads // num_lanes
        return (heads + 2 * self.lane_kv_heads(num_lanes)) * self.head_dim

    def divided(self) -> dict[str, int]:
        """See `MixerKind`."""
        return {"num_attention_heads": self.num_heads}

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        matrices = hidden_size * (self.num_rows + self.num_heads * self.head_dim)
        biases = (self.num_rows if self.qkv_bias else 0) + (hidden_size if self.out_bias else 0)
        return matrices + biases + (self.num_heads if self.sinks else 0) + (2 * self.head_dim if self.qk_norm else 0)


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta rule: a state (key_dim, value_dim) for each value head, which every token decays, corrects and reads.

    Queries, keys and values go through a causal convolution of each channel over the last `conv_width` tokens. Neighbouring
    value heads share a query and key head.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def keys(self) -> int:
        """Values of all key heads, as many as of all query heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Values of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_rows(self) -> int:
        """Rows of queries, keys, values and output gates (z); of decays (a) and corrections (b) one for each value head."""
        return 2 * self.keys + 2 * self.values + 2 * self.num_value_heads

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.keys + self.values

    def num_values(self, hidden_size: int) -> int:
        """See `MixerKind`."""
        small = self.channels * self.conv_width + 2 * self.num_value_heads + self.value_dim
        return hidden_size * (self.num_rows + self.values) + small

    def divided(self) -> dict[str, int]:
        """See `MixerKind`."""
        return {"linear_num_key_heads": self.num_key_heads, "linear_num_value_heads": self.num_value_heads}


@dataclass(frozen=True, slots=True)
class Ffn:
    """SwiGLU of `width` columns."""

    width: int

    def divided(self) -> dict[str, int]:
        """See `MixerKind`."""
        return {"intermediate_size": self.width}

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        return 3 * hidden_size * self.width

    def num_read(self, hidden_size: int) -> int:
        """Those that a token reads."""
        return self.num_values(hidden_size)


@dataclass(frozen=True, slots=True)
class Experts:
    """A router, and experts of which each is an FFN of `width` columns; a token uses `choice.per_token` of them.

    `shared_width`: of an FFN that every token uses besides, times the sigmoid of a gate's product with the stream; 0: none.
    """

    width: int
    choice: ExpertsSpec
    shared_width: int = 0

    @property
    def num_slots(self) -> int:
        """What a token's FFN is made of: the experts that it uses, and the shared one."""
        return self.choice.per_token + bool(self.shared_width)

    @property
    def num_logits(self) -> int:
        """Rows of the router, and of the shared expert's gate."""
        return self.choice.num_experts + bool(self.shared_width)

    def divided(self) -> dict[str, int]:
        """See `MixerKind`."""
        return {"moe_intermediate_size": self.width, "shared_expert_intermediate_size": self.shared_width}

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        return self._num_values(hidden_size, self.choice.num_experts)

    def num_read(self, hidden_size: int) -> int:
        """Those that a token reads: of the experts those that it uses."""
        return self._num_values(hidden_size, self.choice.per_token)

    def _num_values(self, hidden_size: int, num_experts: int) -> int:
        router = self.choice.num_experts * (hidden_size + self.choice.router_bias)
        biases = 2 * self.width + hidden_size if self.choice.bias else 0
        shared = hidden_size * (3 * self.shared_width + bool(self.shared_width))
        return router + num_experts * (3 * hidden_size * self.width + biases) + shared


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of what mixer and FFN read. `by_lane`: each lane has weights of its own. `adds_one`: to the weights in files; to
    those of query and key heads, too.
    """

    eps: float
    by_lane: bool = False
    adds_one: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. Equal layers are equal values: few kinds make a model."""

    mixer: MixerKind
    ffn: FfnKind
    norm: Norm

    def described(self) -> dict[str, object]:
        """All of it, for a digest."""
        return {
            name: [type(part).__name__, repr(part)]
            for name, part in (("mixer", self.mixer), ("ffn", self.ffn), ("norm", self.norm))
        }
