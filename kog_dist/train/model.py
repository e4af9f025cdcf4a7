"""The model as it is trained: a Laneformer whose layers are compiled one by one, or the same weights in Ladder residual form.

One layer is one function of its weights and activations, so torch.compile builds it once per kind of reduction and shape, not
once per layer or per model: twelve layers, every delay and every seed share four graphs. The definition of the lane form is
`kog_dist.model.laneformer`; the tests compare both in float64.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from kog_dist.model.laneformer import KvCache, Laneformer, LaneLayer
from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer
from kog_dist.train.repetition import loop_loss

Angles = tuple[Tensor, Tensor]  # cosines and sines (time, head_dim / 2)
Modes = tuple[ReduceMode, ReduceMode]  # of attention and MLP
Pasts = tuple[Tensor | None, Tensor | None]  # partial sums (lanes, batch, time, hidden) of attention and MLP, `delay` layers ago
_GRAPHS_PER_FUNCTION = 64  # kinds of reduction x lanes x shapes; torch.compile gives up at 8 unless told


class Residual(enum.Enum):
    """How sublayers are joined. Both forms have the same weights."""

    LANES = "lanes"  # as the spec says: delayed, blocking or no reductions
    LADDER = "ladder"  # x_k = x_{k-1} + sum over lanes of f_k(x_{k-2}): blocking sums that the next sublayer does not wait for


def reduced(stream: Tensor, partial: Tensor, mode: ReduceMode, past: Tensor | None) -> Tensor:
    """`stream` plus a sublayer's partial sums (lanes, batch, time, hidden) by the rule of `mode`."""
    if mode is ReduceMode.BLOCKING:
        return stream + partial.sum(0, keepdim=True)
    if mode is ReduceMode.LOCAL:
        return stream + partial * math.sqrt(partial.shape[0])
    assert past is not None
    return stream + (partial + (past.sum(0, keepdim=True) - past))


def lane_layer(
    layer: LaneLayer, modes: Modes, stream: Tensor, pasts: Pasts, angles: Angles, window_mask: BlockMask | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer: the new streams and the partial sums of attention and MLP."""
    attention = layer.attention(layer.attention_norm(stream), *angles, None, window_mask)
    stream = reduced(stream, attention, modes[0], pasts[0])
    mlp = layer.feed_forward(layer.ffn_norm(stream))
    return reduced(stream, mlp, modes[1], pasts[1]), attention, mlp


def ladder_layer(
    layer: LaneLayer, behind: Tensor, stream: Tensor, angles: Angles, window_mask: BlockMask | None
) -> tuple[Tensor, Tensor]:
    """One layer in Ladder form. `behind` is the stream before the last sublayer; returns the new pair (behind, stream)."""
    attention = layer.attention(layer.attention_norm(behind), *angles, None, window_mask).sum(0, keepdim=True)
    mlp = layer.feed_forward(layer.ffn_norm(stream)).sum(0, keepdim=True)
    behind = stream + attention
    return behind, behind + mlp


def token_loss(module: Laneformer, stream: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of residual streams against the next tokens (batch, time)."""
    return functional.cross_entropy(module.logits(stream).flatten(0, 1).float(), targets.flatten())


def looped_token_loss(module: Laneformer, stream: Tensor, targets: Tensor, before: Tensor) -> Tensor:
    """`token_loss` with a penalty for targets that repeat those at `before`: see `loop_loss`."""
    return loop_loss(module.logits(stream), targets, before)


def compiled(function: Callable[..., object]) -> Callable[..., Any]:
    """`function` under torch.compile with room for all the graphs that an ablation needs in one process."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS_PER_FUNCTION)
    # Data parallel training would cut graphs at its buckets of gradients, and refuse flex attention. Layers are graphs already.
    torch._dynamo.config.optimize_ddp = False
    return torch.compile(function, dynamic=False, fullgraph=True)


class TrainingModel(Laneformer):
    """Computes the loss. Weights, their names and their first values are those of `Laneformer(spec, seed)`."""

    def __init__(self, spec: ModelSpec, *, seed: int | None = 0, residual: Residual = Residual.LANES) -> None:
        super().__init__(spec, seed=seed)
        self.residual = residual
        self._lane_layer: Callable[..., tuple[Tensor, Tensor, Tensor]] = lane_layer
        self._ladder_layer: Callable[..., tuple[Tensor, Tensor]] = ladder_layer
        self._token_loss: Callable[..., Tensor] = token_loss
        self._looped_token_loss: Callable[..., Tensor] = looped_token_loss

    def compile_layers(self) -> None:
        """From now on, run layers and loss through torch.compile."""
        self._lane_layer = compiled(lane_layer)
        self._ladder_layer = compiled(ladder_layer)
        self._token_loss = compiled(token_loss)
        self._looped_token_loss = compiled(looped_token_loss)

    def loss(self, token_ids: Tensor, targets: Tensor, before: Tensor | None = None) -> Tensor:
        """Mean loss in nats per token of `targets` (batch, time) behind `token_ids` (batch, time). before: see `loop_loss`."""
        if before is not None:
            return self._looped_token_loss(self, self.streams(token_ids), targets, before)
        return self._token_loss(self, self.streams(token_ids), targets)

    def streams(self, token_ids: Tensor, cache: KvCache | None = None) -> Tensor:
        """The residual streams after the last layer, (lanes or 1, batch, time, hidden)."""
        if cache is not None:
            assert self.residual is Residual.LANES
            return super().streams(token_ids, cache)
        angles = self.cos[: token_ids.shape[1]], self.sin[: token_ids.shape[1]]
        stream: Tensor = self.model.tok_embeddings(token_ids)[None]
        return self._ladder(stream, angles) if self.residual is Residual.LADDER else self._lanes(stream, angles)

    def _lanes(self, stream: Tensor, angles: Angles) -> Tensor:
        spec, partials = self.spec, dict[tuple[int, Sublayer], Tensor]()
        for layer_idx, layer in enumerate(self.model.layers):
            modes = spec.reduce_mode(layer_idx, Sublayer.ATTENTION), spec.reduce_mode(layer_idx, Sublayer.MLP)
            pasts = [partials.pop((layer_idx - spec.delay, sublayer), None) for sublayer in Sublayer]
            if stream.shape[0] == 1 and modes != (ReduceMode.BLOCKING, ReduceMode.BLOCKING):
                # copied, not expanded: a first delayed layer then has the graph of all others
                stream = stream.repeat(spec.num_lanes, 1, 1, 1)
            stream, *own = self._lane_layer(layer, modes, stream, tuple(pasts), angles, self._mask(layer_idx))
            for sublayer, partial in zip(Sublayer, own, strict=True):
                if spec.feeds_layer(layer_idx, sublayer) is not None:
                    partials[layer_idx, sublayer] = partial
        return stream

    def _ladder(self, stream: Tensor, angles: Angles) -> Tensor:
        behind = stream.clone()  # two tensors in the first layer too, so that it has the graph of the others
        for layer_idx, layer in enumerate(self.model.layers):
            behind, stream = self._ladder_layer(layer, behind, stream, angles, self._mask(layer_idx))
        return stream

    def _mask(self, layer_idx: int) -> BlockMask | None:
        return self.window_mask if self.spec.window(layer_idx) is not None else None
