"""Sums over the lanes of all ranks during prefill. With a delay, what is published is wanted only some layers later."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kog_dist.collectives.api import MailboxSpec
from kog_dist.decode.cpu.exchange_calls import RankExchange
from kog_dist.model.spec import ModelSpec, Sublayer
from kog_dist.workers.prefill.base.arrays import Array

MAILBOX = "prefill"


class SumExchange(Protocol):
    """Collective: all ranks run the same chunks and layers in the same order.

    On a GPU both calls queue work (and may be captured in a graph): `publish` should send on a stream of its own, behind what is
    queued, and `total` make the current stream wait for what has arrived. Up to `delay` layers lie between the two.
    """

    @property
    def is_alone(self) -> bool:
        """Whether this rank hosts all lanes. Delayed sums are then made where they are used, and not published."""

    def begin_chunk(self) -> None:
        """A chunk of tokens begins."""

    def begin_last(self) -> None:
        """Until the next chunk begins, sums are of the prompt's last token alone, one row; one of each kind at most."""

    def publish(self, sublayer: Sublayer, layer: int, own_sum: Array) -> None:
        """Send this rank's `own_sum` (size, D) float32 of a layer; it stays unchanged for `delay` more layers."""

    def total(self, sublayer: Sublayer, layer: int, own_sum: Array) -> Array:
        """The sum (size, D) over all ranks of what they published, as a binary tree of neighbours. May be called twice."""

    def share_overflow(self, overflow: Array) -> None:
        """Behind the last chunk: `overflow` (int32, 1 value) becomes 1 if it is on any rank, or if a wait was given up."""

    def stop(self) -> None:
        """End all waits for peers, from the host: what is under way gives wrong sums, and overflows."""

    def check(self) -> None:
        """After `share_overflow` has ended: raises DeviceError if a wait ran out of time."""


class OneRank:
    """A rank that hosts all lanes: the total is its own sum."""

    is_alone = True

    def begin_chunk(self) -> None:
        """See `SumExchange`."""

    def begin_last(self) -> None:
        """See `SumExchange`."""

    def publish(self, sublayer: Sublayer, layer: int, own_sum: Array) -> None:
        """Nothing to send."""

    def total(self, sublayer: Sublayer, layer: int, own_sum: Array) -> Array:
        """The own sum."""
        return own_sum

    def share_overflow(self, overflow: Array) -> None:
        """Nobody else has one."""

    def stop(self) -> None:
        """Nothing waits."""

    def check(self) -> None:
        """Nothing has waited."""


class Rehearsal(OneRank):
    """A rank among others that makes its sums and sends them to nobody, to warm up: results are wrong."""

    is_alone = False


def mailbox(spec: ModelSpec, max_size: int) -> MailboxSpec:
    """What `CommunicatorExchange` needs: 2 * delay + 2 slots, as docs/plan.md says of an exchange of all with all."""
    return MailboxSpec(MAILBOX, 2 * (2 * spec.delay + 2), max_size * spec.hidden_size)


class CommunicatorExchange:
    """Ranks that a communicator of CPU ranks connects. Both kinds of chunks take turns in one mailbox."""

    is_alone = False

    def __init__(self, spec: ModelSpec, max_size: int, communicator: RankExchange) -> None:
        self._box, self._comm = mailbox(spec, max_size), communicator
        self._kept_layers = spec.delay + 1
        self._epoch = 0
        self._sent: dict[tuple[Sublayer, int], tuple[int, int]] = {}  # layer and epoch of what was published last, by place
        self._totals: dict[tuple[Sublayer, int], tuple[int, Array]] = {}

    def begin_chunk(self) -> None:
        """See `SumExchange`."""

    def begin_last(self) -> None:
        """See `SumExchange`."""

    def publish(self, sublayer: Sublayer, layer: int, own_sum: Array) -> None:
        """See `SumExchange`."""
        self._epoch += 1
        self._sent[sublayer, layer % self._kept_layers] = (layer, self._epoch)
        self._totals.pop((sublayer, layer % self._kept_layers), None)
        self._comm.publish(MAILBOX, self._epoch % self._box.num_slots, self._epoch, self._padded(own_sum))

    def total(self, sublayer: Sublayer, layer: int, own_sum: Array) -> Array:
        """See `SumExchange`."""
        place = (sublayer, layer % self._kept_layers)
        if place not in self._totals:
            sent_layer, epoch = self._sent[place]
            assert sent_layer == layer, f"the sum of layer {layer} was not published; its place holds layer {sent_layer}"
            summed = self._comm.delayed_reduce(MAILBOX, epoch % self._box.num_slots, epoch, self._padded(own_sum))
            self._totals[place] = (layer, summed[: own_sum.size].reshape(own_sum.shape))
        kept_layer, total = self._totals[place]
        assert kept_layer == layer
        return total

    def share_overflow(self, overflow: Array) -> None:
        """See `SumExchange`."""
        self._epoch += 1
        slot, own = self._epoch % self._box.num_slots, self._padded(overflow)
        self._comm.publish(MAILBOX, slot, self._epoch, own)
        overflow[...] = self._comm.delayed_reduce(MAILBOX, slot, self._epoch, own)[0] > 0

    def stop(self) -> None:
        """The communicator's waits are bounded, and end with an abort."""

    def check(self) -> None:
        """See `stop`."""

    def _padded(self, own_sum: Array) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        row = np.zeros(self._box.length, np.float32)
        row[: own_sum.size] = own_sum.reshape(-1)
        return row
