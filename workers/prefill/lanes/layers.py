"""One chunk of tokens through all layers: the model's formula, with its delayed sums, as operations in order."""

from __future__ import annotations

from collections.abc import Sequence

from kog_dist.model.spec import ModelSpec, ReduceMode, Sublayer
from kog_dist.workers.prefill.base.arrays import Array
from kog_dist.workers.prefill.base.matrices import LayerMatrices
from kog_dist.workers.prefill.buffers.lanes import Rows
from kog_dist.workers.prefill.exchange.lane_sums import SumExchange
from kog_dist.workers.prefill.lanes.operations import Operations

LATE_SIZE = 1024  # of the smallest chunk whose last layer has no queries: `finish` makes that of the prompt's last token


class Layers:
    """The layers of one rank's lanes. `run` leaves the keys and values of a chunk's tokens in `Buffers`, `finish` the streams of
    the prompt's last token behind the last layer.
    """

    is_all_or_nothing = True  # nothing is in the monokernel's cache before all of it is

    def __init__(self, spec: ModelSpec, matrices: Sequence[LayerMatrices], operations: Operations, exchange: SumExchange) -> None:
        self.spec, self.matrices, self.operations, self.exchange = spec, matrices, operations, exchange
        self._num_shared = num_shared_streams(spec)

    def run(self, rows: Rows) -> None:
        """The next chunk. Collective when there are several ranks."""
        do = self.operations
        do.begin(rows)
        self.exchange.begin_chunk()
        do.embed(self._behind(rows, 0), self.matrices[0].scale)
        for layer, matrices in enumerate(self.matrices):
            is_last = layer == self.spec.num_layers - 1  # keys and values are all that a later token sees of it
            is_late = is_last and rows.size >= LATE_SIZE
            do.append(self._behind(rows, 2 * layer), matrices, layer, queries=not is_late)
            if not is_last:
                self._attend_and_feed(rows, layer)

    def finish(self, rows: Rows, last: Rows) -> None:
        """What is left of the last layer, for the prompt's last token, which is in the chunk that was run in `rows`. `last` has
        room for one token. Collective when there are several ranks.
        """
        do, spec, exchange = self.operations, self.spec, self.exchange
        layer = spec.num_layers - 1
        past_layer = layer - spec.delay
        delayed = [sublayer for sublayer in Sublayer if spec.reduce_mode(layer, sublayer) is ReduceMode.DELAYED]
        pasts = [(self._partial(rows, sublayer, past_layer), self._partial(last, sublayer, past_layer)) for sublayer in delayed]
        do.take_last(rows, last, pasts)
        if rows.size >= LATE_SIZE:
            do.append(last, self.matrices[layer], layer, others=False)
        exchange.begin_last()
        for sublayer in delayed if not exchange.is_alone else []:
            own_sum = self._own_sum(last, sublayer, past_layer)
            do.lane_sum(last, self._partial(last, sublayer, past_layer), own_sum)
            exchange.publish(sublayer, past_layer, own_sum)
        self._attend_and_feed(last, layer)
        do.give_streams(last)

    def load_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        self.operations.load_cache(first, last)

    def store_cache(self, first: int, last: int) -> None:
        """See `Operations`."""
        self.operations.store_cache(first, last)

    def _attend_and_feed(self, rows: Rows, layer: int) -> None:
        do, matrices = self.operations, self.matrices[layer]
        self._project(rows, Sublayer.ATTENTION, layer, do.attend(rows, layer), matrices.wo)
        do.gate(self._behind(rows, 2 * layer + 1), matrices.w13)
        self._project(rows, Sublayer.MLP, layer, rows.activation, matrices.w2)

    def _project(self, rows: Rows, sublayer: Sublayer, layer: int, x: Array, matrix: Array) -> None:
        """A sublayer's partial sums, x (L, size, K) times its matrix, added to the streams as docs/plan.md says of RESIDUAL."""
        do, spec, exchange = self.operations, self.spec, self.exchange
        partial, own_sum = self._partial(rows, sublayer, layer), self._own_sum(rows, sublayer, layer)
        unscale, scale = self._scales(sublayer, layer)
        feeds = spec.feeds_layer(layer, sublayer)
        is_fed_on = feeds is not None and feeds < spec.num_layers - 1  # `finish` sums for the last layer, one row
        is_published = is_fed_on and not exchange.is_alone
        mode = spec.reduce_mode(layer, sublayer)
        before, after = (self._behind(rows, 2 * layer + sublayer + i) for i in range(2))
        do.product(x, matrix, partial[:, : x.shape[1]])  # the second plane of an exact chunk stays 0 if x was rounded
        past: Array | None = None
        total: Array | None = None
        if mode is ReduceMode.BLOCKING:
            if not exchange.is_alone:
                do.lane_sum(rows, partial, own_sum)
                exchange.publish(sublayer, layer, own_sum)
                total = exchange.total(sublayer, layer, own_sum)
            do.residual(before, after, mode, partial, None, total, None, unscale, scale)
            return
        if mode is ReduceMode.DELAYED:
            past_layer = layer - spec.delay
            past = self._partial(rows, sublayer, past_layer)
            if not exchange.is_alone:  # else the residual adds `past` up, of which it reads all lanes: fewer bytes
                total = exchange.total(sublayer, past_layer, self._own_sum(rows, sublayer, past_layer))
        do.residual(before, after, mode, partial, past, total, own_sum if is_published else None, unscale, scale)
        if is_published:
            exchange.publish(sublayer, layer, own_sum)

    def _behind(self, rows: Rows, num_residuals: int) -> Rows:
        """The rows, with the streams as they are kept behind so many residuals."""
        is_shared = num_residuals < self._num_shared and len(rows.stream) > 1 and not rows.is_exact
        return rows.shared if is_shared else rows

    def _scales(self, sublayer: Sublayer, layer: int) -> tuple[Array | None, Array | None]:
        """By what a residual multiplies the streams that it reads, and those that it writes: `wqkv` wants them scaled."""
        if sublayer is Sublayer.ATTENTION:
            return self.matrices[layer].unscale, None
        return None, self.matrices[layer + 1].scale if layer + 1 < len(self.matrices) else None

    def _partial(self, rows: Rows, sublayer: Sublayer, layer: int) -> Array:
        """Where the partial sums of a layer are."""
        return rows.partials[sublayer][layer % (self.spec.delay + 1)]

    def _own_sum(self, rows: Rows, sublayer: Sublayer, layer: int) -> Array:
        return rows.own_sums[sublayer][layer % (self.spec.delay + 1)]


def num_shared_streams(spec: ModelSpec) -> int:
    """Behind fewer residuals than this all lanes have the same stream: that of the embedding, plus sums over all lanes. `finish`
    has all of them.
    """
    if not spec.shared_norm_scale:
        return 0
    residuals = [(layer, sublayer) for layer in range(spec.num_layers - 1) for sublayer in (Sublayer.ATTENTION, Sublayer.MLP)]
    blocking = [spec.reduce_mode(layer, sublayer) is ReduceMode.BLOCKING for layer, sublayer in residuals]
    return min(len(residuals), [*blocking, False].index(False) + 1)
