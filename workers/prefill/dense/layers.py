"""One chunk of tokens through all layers of a model with one residual stream: the model's formula, as operations in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kog_dist.model.layers import AttentionMixer, DeltaNet, Experts, Ffn
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.scale import ACTIVATION_SCALE
from kog_dist.workers.prefill.exchange.lane_sums import SumExchange

if TYPE_CHECKING:
    from kog_dist.workers.prefill.base.matrices import DenseMatrices
    from kog_dist.workers.prefill.buffers.dense import DenseRows
    from kog_dist.workers.prefill.dense.operations import DenseOperations


class DenseLayers:
    """The layers of one rank's lanes. `run` leaves the keys and values of a chunk's tokens in the monokernel's cache, `finish`
    the stream of the prompt's last token behind the last layer in `DenseBuffers`.
    """

    is_all_or_nothing = False  # a layer's keys and values are stored when they are made; states when a whole chunk has run

    def __init__(
        self, spec: ModelSpec, matrices: Sequence[DenseMatrices], operations: DenseOperations, exchange: SumExchange
    ) -> None:
        self.spec, self.matrices, self.operations, self.exchange = spec, matrices, operations, exchange

    def run(self, rows: DenseRows, part: int = 0, num_parts: int = 1) -> None:
        """Part `part` of `num_parts` of the next chunk, some layers each; all parts make the chunk, one after the other.

        Of the last layer it runs the mixer only as far as later tokens need it. Collective when there are several ranks.
        """
        do, num_layers = self.operations, self.spec.num_layers
        if part == 0:
            do.begin(rows)
            self.exchange.begin_chunk()
            do.embed(rows, self.matrices[0].attention_norm)
        for layer in range(part * num_layers // num_parts, (part + 1) * num_layers // num_parts):
            if isinstance(self.spec.layers[layer].mixer, DeltaNet):
                do.recur(rows, self.matrices[layer], layer)
            else:
                do.append(rows, self.matrices[layer], layer)
            if layer < num_layers - 1:
                self._project_and_feed(rows, layer)
        if part == num_parts - 1 and self.spec.is_recurrent:
            do.keep_states()

    def finish(self, rows: DenseRows, last: DenseRows) -> None:
        """What is left of the last layer, for the prompt's last token, which is in the chunk that was run in `rows` just before.
        `last` has room for one token. Collective when there are several ranks.
        """
        self.operations.take_last(rows, last)
        self.exchange.begin_last()
        self._project_and_feed(last, self.spec.num_layers - 1)
        self.operations.give_stream(last)

    def load_cache(self, first: int, last: int) -> None:
        """Nothing: each layer takes what it needs from the cache."""

    def store_cache(self, first: int, last: int) -> None:
        """Nothing: it is stored."""

    def _mixed(self, rows: DenseRows, layer: int) -> Array:
        """What the layer's mixer gives, whose first part has run."""
        do, mixer = self.operations, self.spec.layers[layer].mixer
        if isinstance(mixer, DeltaNet):
            assert rows.mixed is not None
            return rows.mixed
        mixed = do.attend(rows, layer, self.matrices[layer].sinks)
        if isinstance(mixer, AttentionMixer) and mixer.gated:
            do.gate_heads(rows, mixed)
        return mixed

    def _project_and_feed(self, rows: DenseRows, layer: int) -> None:
        do, matrices = self.operations, self.matrices[layer]
        do.project(rows, self._mixed(rows, layer), matrices)
        self._add(rows, Sublayer.ATTENTION, layer, 1.0, matrices.ffn_norm, matrices.out_bias)
        match self.spec.layers[layer].ffn:
            case Experts() as experts:
                do.mix(rows, matrices, layer)
                if experts.shared_width:
                    do.add_shared(rows, matrices)
            case Ffn():
                do.gate(rows, matrices)
                do.lower(rows, matrices)
        is_last = layer == self.spec.num_layers - 1
        self._add(rows, Sublayer.MLP, layer, 1 / ACTIVATION_SCALE, None if is_last else self.matrices[layer + 1].attention_norm)

    def _add(
        self, rows: DenseRows, sublayer: Sublayer, layer: int, scale: float, norm: Array | None, bias: Array | None = None
    ) -> None:
        """stream += `scale` times the sum of all lanes' partial sums, those of other ranks included; x = its norm. `bias`: of the
        sum, on the rank of the first lane.
        """
        do, exchange, own_sum = self.operations, self.exchange, rows.own_sums[sublayer]
        total: Array | None = None
        if not exchange.is_alone:
            do.lane_sum(rows, scale, own_sum, bias)
            exchange.publish(sublayer, layer, own_sum)
            total = exchange.total(sublayer, layer, own_sum)
        do.residual(rows, scale, total, norm, bias)
