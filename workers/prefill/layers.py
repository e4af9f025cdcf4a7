"""One block of tokens through all layers: the model's formula, with its delayed sums, as operations in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from kog_dist.model.spec import Block, ModelSpec, ReduceMode
from kog_dist.workers.prefill.buffers import Rows
from kog_dist.workers.prefill.exchange import SumExchange
from kog_dist.workers.prefill.matrices import LayerMatrices
from kog_dist.workers.prefill.operations import Operations

if TYPE_CHECKING:
    from torch import Tensor


Hook = Callable[[int], None]


class Together(Protocol):
    """Two queues of work on one device, for blocks that run at the same time."""

    def first(self) -> AbstractContextManager[None]:
        """What is queued within belongs to the first block."""

    def second(self) -> AbstractContextManager[None]:
        """What is queued within belongs to the second block."""

    def appended(self, layer: int) -> None:
        """The first block's keys and values of a layer are queued."""

    def wait_for(self, layer: int) -> None:
        """The second block goes on when they are there."""

    def join(self) -> None:
        """What is queued from here on waits for both."""


def _nothing(_layer: int) -> None:
    pass


class Layers:
    """The layers of one rank's lanes. `run` leaves the keys and values of a block's tokens in `Buffers`, and nothing else.

    Partial sums are made and added to the streams `stripe` rows at a time (0: all), so that they are still in the cache then.
    """

    def __init__(
        self,
        spec: ModelSpec,
        matrices: Sequence[LayerMatrices],
        operations: Operations,
        exchange: SumExchange,
        *,
        stripe: int = 0,
    ) -> None:
        self.spec, self.matrices, self.operations, self.exchange = spec, matrices, operations, exchange
        self._stripe = stripe

    def run(self, rows: Rows) -> None:
        """The next block. Collective when there are several ranks."""
        self.operations.begin(rows)
        self.exchange.begin_block()
        self.forward(rows)

    def run_pair(self, first: Rows, second: Rows, *, together: Together) -> None:
        """The next two blocks, the second one beside the first: it waits for the first one's keys and values, layer by layer."""
        self.operations.begin(first)
        self.operations.begin(second)
        with together.first():
            self.forward(first, appended=together.appended)
        with together.second():
            self.forward(second, before_attention=together.wait_for)
        together.join()

    def forward(self, rows: Rows, *, appended: Hook = _nothing, before_attention: Hook = _nothing) -> None:
        """A block that has begun. The hooks are called with the layer."""
        do = self.operations
        do.embed(rows, self.matrices[0].scale)
        for layer, matrices in enumerate(self.matrices):
            do.product(rows.stream, matrices.wqkv, rows.qkv)
            do.append(rows, layer)
            appended(layer)
            if layer == self.spec.num_layers - 1:
                return  # its keys and values are all that a later token sees of it
            before_attention(layer)
            self.finish_layer(rows, layer)

    def finish_layer(self, rows: Rows, layer: int) -> None:
        """A layer from its queries, keys and values on."""
        do, matrices = self.operations, self.matrices[layer]
        assert matrices.wo is not None
        assert matrices.w13 is not None
        assert matrices.w2 is not None
        self._project(rows, Block.ATTENTION, layer, do.attend(rows, layer), matrices.wo)
        do.gate(rows, matrices.w13)
        self._project(rows, Block.MLP, layer, rows.activation, matrices.w2)

    def _project(self, rows: Rows, block: Block, layer: int, x: Tensor, matrix: Tensor) -> None:
        """A block's partial sums, x (L, size, K) times its matrix, added to the streams as docs/plan.md says of RESIDUAL."""
        do, spec, exchange = self.operations, self.spec, self.exchange
        partial, own_sum = self.partial(rows, block, layer), self._own_sum(rows, block, layer)
        unscale, scale = self._scales(block, layer)
        feeds = spec.feeds_layer(layer, block)
        is_fed_on = feeds is not None and feeds < spec.num_layers - 1  # nothing of the last layer is summed
        is_published = is_fed_on and not exchange.is_alone
        mode = spec.reduce_mode(layer, block)
        if mode is ReduceMode.BLOCKING:
            whole = slice(0, rows.size)
            self._multiply(rows, x, matrix, partial, whole)
            do.lane_sum(rows, partial, own_sum)
            exchange.publish(block, layer, own_sum)
            do.residual(rows, mode, partial, None, exchange.total(block, layer, own_sum), None, unscale, scale, whole)
            return
        past: Tensor | None = None
        total: Tensor | None = None
        if mode is ReduceMode.DELAYED:
            past_layer = layer - spec.delay
            past = self.partial(rows, block, past_layer)
            if not exchange.is_alone:  # else the residual adds `past` up, of which it reads all lanes: fewer bytes
                total = exchange.total(block, past_layer, self._own_sum(rows, block, past_layer))
        for span in self._spans(rows):
            self._multiply(rows, x, matrix, partial, span)
            do.residual(rows, mode, partial, past, total, own_sum if is_published else None, unscale, scale, span)
        if is_published:
            exchange.publish(block, layer, own_sum)

    def _multiply(self, rows: Rows, x: Tensor, matrix: Tensor, partial: Tensor, span: slice) -> None:
        """These rows of the partial sums; all of an exact block, where x has two planes, or one, if it was rounded."""
        if not rows.is_exact:
            self.operations.product(x[:, span], matrix, partial[:, span])
            return
        num_rows = x.shape[1]
        self.operations.product(x, matrix, partial[:, :num_rows])
        partial[:, num_rows:].zero_()

    def _spans(self, rows: Rows) -> list[slice]:
        stripe = rows.size if rows.is_exact or not self._stripe else self._stripe
        return [slice(first, min(first + stripe, rows.size)) for first in range(0, rows.size, stripe)]

    def _scales(self, block: Block, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """By what a residual multiplies the streams that it reads, and those that it writes: `wqkv` wants them scaled."""
        if block is Block.ATTENTION:
            return self.matrices[layer].unscale, None
        return None, self.matrices[layer + 1].scale if layer + 1 < len(self.matrices) else None

    def partial(self, rows: Rows, block: Block, layer: int) -> Tensor:
        """Where the partial sums of a layer are."""
        return rows.partials[block][layer % (self.spec.delay + 1)]

    def _own_sum(self, rows: Rows, block: Block, layer: int) -> Tensor:
        return rows.own_sums[block][layer % (self.spec.delay + 1)]
