"""The Laneformer in torch: the oracle of every engine, and the module that is trained.

Activations are lane-first: a residual stream is (lanes, batch, time, hidden). While all lanes still hold the same stream
(before the first delayed or local reduction) its lane dimension is 1, so an ordinary Llama-like model never pays for lanes.
Parameters carry the names and shapes of the published checkpoint.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from kog_dist.errors import ConfigError
from kog_dist.model.kv_oracle import KvForm, kv_form
from kog_dist.model.lane_experts import LaneExperts
from kog_dist.model.lane_linear import LaneLinear, lane_matmul
from kog_dist.model.rope import rope_table
from kog_dist.model.spec import HeadType, ModelSpec, ReduceMode, Sublayer


class HeadNorm(nn.Module):
    """RMS norm of every head (last dimension), with one weight for all heads."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.weight = nn.Parameter(torch.ones(spec.head_dim))

    def forward(self, heads: Tensor) -> Tensor:
        """Normalise `heads` (..., head_dim)."""
        return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps) * self.weight


class LaneNorm(nn.Module):
    """RMS norm of the last dimension with one scale for all lanes (`weight`) or one per lane (`scale`)."""

    def __init__(self, spec: ModelSpec, *, per_lane: bool) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.per_lane = per_lane
        if per_lane:
            self.scale = nn.Parameter(torch.ones(spec.num_lanes, spec.hidden_size))
        else:
            self.weight = nn.Parameter(torch.ones(spec.hidden_size))

    def forward(self, stream: Tensor) -> Tensor:
        """Normalise `stream` (lanes or 1, batch, time, hidden); per-lane scales give all lanes."""
        weight = self.scale[:, None, None, :] if self.per_lane else self.weight
        return stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.eps) * weight


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn adjacent pairs of `x` (..., time, heads, head_dim) by the angles of `cos`, `sin` (time, head_dim / 2)."""
    pairs = x.view(*x.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class KvCache:
    """Keys and values of all tokens so far, per layer (batch, lanes * lane_kv_heads, time, head_dim). Grows with each call."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._layers: list[Tensor] = []  # (2, batch, heads, room, head_dim): keys, values; room doubles when it is used up

    def extend(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new positions of one layer; returns all positions of it."""
        start, stop = self.num_tokens, self.num_tokens + key.shape[2]
        if layer_idx == len(self._layers):
            self._layers.append(key.new_empty(2, *key.shape))
        stored = self._layers[layer_idx]
        if stop > stored.shape[3]:
            grown = stored.new_empty(*stored.shape[:3], 2 * stop, stored.shape[4])
            grown[:, :, :, :start] = stored[:, :, :, :start]
            stored = self._layers[layer_idx] = grown
        stored[0, :, :, start:stop] = key
        stored[1, :, :, start:stop] = value
        return stored[0, :, :, :stop], stored[1, :, :, :stop]

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows of the batch, in this order."""
        self._layers = [stored[:, rows] for stored in self._layers]


class LaneAttention(nn.Module):
    """Attention of all lanes; each lane has its own heads and reads only its own stream."""

    def __init__(self, spec: ModelSpec, layer_idx: int) -> None:
        super().__init__()
        lanes, d = spec.num_lanes, spec.hidden_size
        self.layer_idx = layer_idx
        self.window = spec.window(layer_idx)
        self.head_dim, self.heads, self.kv_heads = spec.head_dim, spec.lane_heads, spec.lane_kv_heads
        self.kv_form: KvForm | None = None
        self.wq = LaneLinear(lanes, self.heads * self.head_dim, d, has_bias=spec.qkv_bias)
        self.wk = LaneLinear(lanes, self.kv_heads * self.head_dim, d, has_bias=spec.qkv_bias)
        self.wv = LaneLinear(lanes, self.kv_heads * self.head_dim, d, has_bias=spec.qkv_bias)
        self.wo = LaneLinear(lanes, d, self.heads * self.head_dim)
        if spec.out_bias:
            self.wo.bias = nn.Parameter(torch.zeros(d))  # of the sum over lanes: the first one adds it
        self.has_out_bias = spec.out_bias
        if spec.attention_sinks:
            self.sinks = nn.Parameter(torch.zeros(lanes, self.heads))
        self.has_sinks = spec.attention_sinks
        if spec.qk_norm:
            self.q_norm, self.k_norm = HeadNorm(spec), HeadNorm(spec)
        self.has_bias, self.has_norms = spec.qkv_bias, spec.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KvCache | None, window_mask: BlockMask | None) -> Tensor:
        """Partial sums (lanes, batch, time, hidden) of the normalised streams `x`."""
        lanes, batch, time = self.wq.weight.shape[0], x.shape[1], x.shape[2]
        qkv = lane_matmul(x, torch.cat((self.wq.weight, self.wk.weight, self.wv.weight), dim=1))
        if self.has_bias:
            qkv = qkv + torch.cat((self.wq.bias, self.wk.bias, self.wv.bias), dim=1)[:, None, None]
        qkv = qkv.view(*qkv.shape[:-1], -1, self.head_dim)
        query, key, value = torch.split(qkv, [self.heads, self.kv_heads, self.kv_heads], dim=3)
        if self.has_norms:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (
            part.permute(1, 0, 3, 2, 4).reshape(batch, -1, time, self.head_dim)
            for part in (rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin), value)
        )
        if self.kv_form is not None:
            key, value = self.kv_form.enter_keys(key), self.kv_form.enter_values(value)
        if cache is not None:
            key, value = cache.extend(self.layer_idx, key, value)
        mixed = self._attend(query, key, value, window_mask)
        mixed = mixed.view(batch, lanes, self.heads, time, self.head_dim).permute(1, 0, 3, 2, 4)
        partial = lane_matmul(mixed.reshape(lanes, batch, time, self.heads * self.head_dim), self.wo.weight)
        return torch.cat((partial[:1] + self.wo.bias, partial[1:])) if self.has_out_bias else partial

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, window_mask: BlockMask | None) -> Tensor:
        if self.has_sinks:
            return self._attend_with_sinks(query, key, value)
        grouped = self.heads != self.kv_heads
        time, num_keys = query.shape[2], key.shape[2]
        if self.window is None and (time == num_keys or time == 1):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=time > 1, enable_gqa=grouped)
        if self.window is not None and window_mask is not None:
            result = flex_attention(query, key, value, block_mask=window_mask, enable_gqa=grouped)
            assert isinstance(result, Tensor)
            return result
        seen = self._seen(query, key)
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=grouped)

    def _seen(self, query: Tensor, key: Tensor) -> Tensor:
        """Which keys each of the last positions sees, (time, keys)."""
        time, num_keys = query.shape[2], key.shape[2]
        key_pos = torch.arange(num_keys, device=query.device)
        query_pos = torch.arange(num_keys - time, num_keys, device=query.device)[:, None]
        seen = key_pos <= query_pos
        return seen if self.window is None else seen & (key_pos > query_pos - self.window)

    def _attend_with_sinks(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Of each head the softmax has one more logit, which nothing is mixed from."""
        group = self.heads // self.kv_heads
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = (query @ key.transpose(2, 3)) * self.head_dim**-0.5
        scores = scores.masked_fill(~self._seen(query, key), -math.inf)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        mixed: Tensor = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1] @ value
        return mixed


class LaneFeedForward(nn.Module):
    """SwiGLU of all lanes; each lane has its own columns."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        lanes, d = spec.num_lanes, spec.hidden_size
        self.w1 = LaneLinear(lanes, spec.lane_ffn, d)
        self.w2 = LaneLinear(lanes, d, spec.lane_ffn)
        self.w3 = LaneLinear(lanes, spec.lane_ffn, d)

    def forward(self, x: Tensor) -> Tensor:
        """Partial sums (lanes, batch, time, hidden) of the normalised streams `x`."""
        gate, up = lane_matmul(x, torch.cat((self.w1.weight, self.w3.weight), dim=1)).chunk(2, dim=-1)
        return lane_matmul(functional.silu(gate) * up, self.w2.weight)


class LaneLayer(nn.Module):
    """Attention and feed-forward of one layer, with a norm in front of each."""

    def __init__(self, spec: ModelSpec, layer_idx: int) -> None:
        super().__init__()
        self.attention_norm = LaneNorm(spec, per_lane=not spec.shared_norm_scale)
        self.attention = LaneAttention(spec, layer_idx)
        self.ffn_norm = LaneNorm(spec, per_lane=not spec.shared_norm_scale)
        self.feed_forward = LaneFeedForward(spec) if spec.experts is None else LaneExperts(spec, spec.experts)


class LaneStack(nn.Module):
    """Embedding, layers and final norm: what the published names put under `model.`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(LaneLayer(spec, layer_idx) for layer_idx in range(spec.num_layers))
        self.norm = LaneNorm(spec, per_lane=not spec.shared_norm_scale and not spec.pre_norm_lane_agg)


class LmHead(nn.Module):
    """The matrix of the LM head under its published name: `weight`, or `linear.weight` for the `lane` form."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        vocab, d, lanes = spec.vocab_size, spec.hidden_size, spec.num_lanes
        if spec.head_type is HeadType.LANE:
            self.linear = nn.Linear(lanes * d, vocab, bias=False)
        elif spec.head_type is HeadType.VOCAB_PARALLEL:
            self.weight = nn.Parameter(torch.empty(lanes, vocab // lanes, d))
        else:
            self.weight = nn.Parameter(torch.empty(vocab, d))


class Laneformer(nn.Module):
    """A whole model, float32 or (`.double()`) float64, on CPU or CUDA; whole sequences, or in pieces with a `KvCache`.

    Parameters are drawn from `seed`; None leaves them unset, for a caller that loads them.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: ModelSpec, *, seed: int | None = 0) -> None:
        super().__init__()
        self.spec = spec
        self.model = LaneStack(spec)
        if not spec.tied_embeddings:
            self.lm_head = LmHead(spec)
        cos, sin = rope_table(spec, spec.max_context)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)
        self.window_mask: BlockMask | None = None
        if seed is not None:
            self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        spec = self.spec
        for name, parameter in self.named_parameters():
            if "norm" in name or name.endswith((".bias", ".sinks")):
                continue
            std = 0.05 if "tok_embeddings" in name else 0.5 * parameter.shape[-1] ** -0.5
            if name.endswith(("wo.weight", "w2.weight")):  # L lanes add up, in every layer
                std *= (2 * spec.num_layers * spec.num_lanes) ** -0.5
            parameter.normal_(0.0, std, generator=generator)

    @classmethod
    def from_checkpoint(cls, folder: Path, dtype: torch.dtype = torch.float32) -> Laneformer:
        """Read a published checkpoint folder. Raises CheckpointError as `open_checkpoint` does."""
        from kog_dist.model.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(folder)
        module = cls(checkpoint.spec, seed=None)
        module.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name)) for name in module.state_dict()})
        return module.to(dtype)

    def round_keys_and_values(self, form: torch.dtype | str) -> None:
        """From now on, round keys and values to `form` before they are used, as an engine with such a KV cache does.

        A type, or the name of a format of `kv_formats.py`.
        """
        chosen = kv_form(form)
        for layer in self.model.layers:
            assert isinstance(layer, LaneLayer)
            layer.attention.kv_form = chosen

    def use_flex_windows(self, time: int) -> None:
        """Compute windowed layers of full sequences of `time` tokens with flex attention (CUDA, under torch.compile)."""
        window = self.spec.sliding_window
        if window is None:
            raise ConfigError("flex attention windows were asked for, but the model has no sliding_window")

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key > query - window)

        self.window_mask = create_block_mask(seen, B=None, H=None, Q_LEN=time, KV_LEN=time, device=self.cos.device)

    def forward(self, token_ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """Logits (batch, time, vocab) of `token_ids` (batch, time), which continue what `cache` holds.

        Raises ConfigError if the positions exceed the context of the spec.
        """
        return self.logits(self.streams(token_ids, cache))

    def streams(self, token_ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """The residual streams after the last layer, (lanes or 1, batch, time, hidden)."""
        start = cache.num_tokens if cache is not None else 0
        stop = start + token_ids.shape[1]
        if stop > self.spec.max_context:
            raise ConfigError(f"{stop} positions exceed the model's context of {self.spec.max_context}; give fewer tokens")
        cos, sin = self.cos[start:stop], self.sin[start:stop]
        stream: Tensor = self.model.tok_embeddings(token_ids)[None]
        partials: dict[tuple[int, Sublayer], Tensor] = {}
        for layer_idx, layer in enumerate(self.model.layers):
            assert isinstance(layer, LaneLayer)
            partial = layer.attention(layer.attention_norm(stream), cos, sin, cache, self.window_mask)
            stream = self._reduce(stream, partial, layer_idx, Sublayer.ATTENTION, partials)
            partial = layer.feed_forward(layer.ffn_norm(stream))
            stream = self._reduce(stream, partial, layer_idx, Sublayer.MLP, partials)
        if cache is not None:
            cache.num_tokens = stop
        return stream

    def _reduce(
        self, stream: Tensor, partial: Tensor, layer_idx: int, sublayer: Sublayer, partials: dict[tuple[int, Sublayer], Tensor]
    ) -> Tensor:
        """Add a sublayer's partial sums to the streams; keeps them in `partials` for the layer that they feed."""
        spec = self.spec
        if spec.feeds_layer(layer_idx, sublayer) is not None:
            partials[layer_idx, sublayer] = partial
        mode = spec.reduce_mode(layer_idx, sublayer)
        if mode is ReduceMode.BLOCKING:
            return stream + partial.sum(0, keepdim=True)
        if mode is ReduceMode.LOCAL:
            return stream + partial * math.sqrt(spec.num_lanes)
        past = partials.pop((layer_idx - spec.delay, sublayer))
        return stream + (partial + (past.sum(0, keepdim=True) - past))

    def logits(self, stream: Tensor) -> Tensor:
        """Logits (batch, time, vocab) of residual streams (lanes or 1, batch, time, hidden)."""
        spec = self.spec
        if spec.pre_norm_lane_agg:
            stream = stream.expand(spec.num_lanes, -1, -1, -1).sum(0, keepdim=True)
        normed: Tensor = self.model.norm(stream)
        if spec.head_type is HeadType.VOCAB_PARALLEL:
            return torch.cat(lane_matmul(normed, self.lm_head.weight).unbind(0), dim=-1)
        if spec.head_type is HeadType.LANE:
            every_lane = torch.cat(normed.expand(spec.num_lanes, -1, -1, -1).unbind(0), dim=-1)
            return functional.linear(every_lane, self.lm_head.linear.weight)
        weight = self.model.tok_embeddings.weight if spec.tied_embeddings else self.lm_head.weight
        return functional.linear(normed.mean(0), weight)
