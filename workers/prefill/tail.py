"""Logits of a prompt's last token from the block that it stands in, so that the monokernel need not read all weights for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kog_dist.model.spec import Block, HeadType, ReduceMode
from kog_dist.workers.prefill.buffers import Buffers, Rows
from kog_dist.workers.prefill.layers import Layers
from kog_dist.workers.prefill.matrices import HeadMatrices

if TYPE_CHECKING:
    from torch import Tensor

_TURN = 2  # memory of its own, beside that of the blocks


class Tail:
    """One row through the rest of the last layer and the LM head. For a rank that hosts all lanes."""

    def __init__(self, layers: Layers, buffers: Buffers, head: HeadMatrices) -> None:
        import torch

        assert layers.exchange.is_alone
        self._layers, self._buffers, self._head, self.spec = layers, buffers, head, layers.spec
        self._row = buffers.rows(1, _TURN, is_exact=True)
        self.logits = torch.zeros(self.spec.vocab_size, device=buffers.device)  # float32

    def run(self, rows: Rows) -> None:
        """Queue it behind the block that ends with the prompt's last token, whose memory is `rows`."""
        layers, row, layer = self._layers, self._row, self.spec.num_layers - 1
        place = (self._buffers.last_position - rows.place[:1]).long().clamp(0, rows.size - 1)  # a warm-up is in no prompt
        row.place[:1].copy_(self._buffers.last_position)
        row.place[2:].copy_(self._buffers.last_position + 1)
        row.query.copy_(rows.query.index_select(0, place))
        self._take(row.stream, rows.stream, rows.size, place)
        for block in Block:
            if self.spec.reduce_mode(layer, block) is ReduceMode.DELAYED:
                past = layer - self.spec.delay
                self._take(layers.partial(row, block, past), layers.partial(rows, block, past), rows.size, place)
        layers.finish_layer(row, layer)
        weight = self._head.weight
        layers.operations.scores(self._input().view(len(weight), -1), weight, self.logits.view(len(weight), -1))

    def _take(self, to: Tensor, source: Tensor, size: int, place: Tensor) -> None:
        """A row of all planes; the second plane stays 0 if there is none."""
        for plane in range(source.shape[1] // size):
            to[:, plane : plane + 1].copy_(source.index_select(1, place + plane * size))
        if source.shape[1] == size:
            to[:, 1:].zero_()

    def _input(self) -> Tensor:
        """What the LM head is multiplied with, float32: (1, D), (1, lanes * D) or (lanes, D)."""
        spec, streams = self.spec, self._row.stream.float().sum(1)  # (lanes, D)
        if spec.pre_norm_lane_agg:
            streams = streams.sum(0, keepdim=True)
        normed: Tensor = streams * (streams.square().mean(-1, keepdim=True) + spec.norm_eps).rsqrt() * self._head.norm
        return normed.mean(0) if spec.head_type is HeadType.REPLICATE else normed
