"""What a layer is, as data: the kind of its mixer (attention), the kind of its FFN, its norms. Sizes are those of all lanes."""

from __future__ import annotations

from dataclasses import dataclass

from kog_dist.model.experts import ExpertsSpec


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """Causal softmax attention over keys and values of all positions, or of a window.

    `window`: positions that a token sees, itself included; None: all before it. `qkv_bias` is added to queries, keys and values,
    `out_bias` to the output. `qk_norm`: an RMS norm of every query and key head before it is rotated. `sinks`: one more logit in
    the softmax of each query head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False

    @property
    def num_rows(self) -> int:
        """Query, key and value rows."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        matrices = hidden_size * (self.num_rows + self.num_heads * self.head_dim)
        biases = (self.num_rows if self.qkv_bias else 0) + (hidden_size if self.out_bias else 0)
        return matrices + biases + (self.num_heads if self.sinks else 0) + (2 * self.head_dim if self.qk_norm else 0)


@dataclass(frozen=True, slots=True)
class Ffn:
    """SwiGLU of `width` columns."""

    width: int

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        return 3 * hidden_size * self.width

    def num_read(self, hidden_size: int) -> int:
        """Those that a token reads."""
        return self.num_values(hidden_size)


@dataclass(frozen=True, slots=True)
class Experts:
    """A router, and experts of which each is an FFN of `width` columns; a token uses `choice.per_token` of them."""

    width: int
    choice: ExpertsSpec

    def num_values(self, hidden_size: int) -> int:
        """Parameters."""
        return self._num_values(hidden_size, self.choice.num_experts)

    def num_read(self, hidden_size: int) -> int:
        """Those that a token reads: of the experts those that it uses."""
        return self._num_values(hidden_size, self.choice.per_token)

    def _num_values(self, hidden_size: int, num_experts: int) -> int:
        router = self.choice.num_experts * (hidden_size + self.choice.router_bias)
        biases = 2 * self.width + hidden_size if self.choice.bias else 0
        return router + num_experts * (3 * hidden_size * self.width + biases)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of what mixer and FFN read. `by_lane`: each lane has weights of its own."""

    eps: float
    by_lane: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. Equal layers are equal values: few kinds make a model."""

    mixer: AttentionMixer
    ffn: Ffn | Experts
    norm: Norm
