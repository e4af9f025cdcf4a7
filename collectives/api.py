"""What every KCCL communicator offers, on CPU ranks over shared memory and on GPUs over IPC-mapped peer memory.

A communicator moves float32 vectors between ranks through mailboxes in the symmetric heap. A mailbox is a named set of slots,
declared by the plan; a slot holds one vector per source rank, as 64-bit words that carry payload and epoch. Values are pushed
into the peers' memory and only ever read from local memory. Every wait is bounded: it ends normally, or raises AbortedError (the
engine is being stopped) or DeviceError (time ran out; the record says what was waited for). After either, nothing is published
any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kog_dist.records import dataclass

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class MailboxSpec:
    """One mailbox of the plan: `num_slots` slots, each with room for `length` float32 values from every rank.

    `most`: a message is so many vectors of that length at most, one after the other.
    """

    name: str
    num_slots: int
    length: int
    most: int = 1


class Communicator(Protocol):
    """The collectives of one rank. Every rank declares the same mailboxes in the same order."""

    rank: int
    world_size: int

    def publish(self, mailbox: str, slot: int, epoch: int, values: Vector) -> None:
        """Push `values` into this rank's row of the slot on every peer. Does not wait."""

    def collect(self, mailbox: str, slot: int, epoch: int, own: Vector) -> NDArray[np.float32]:
        """Wait for the slot's rows of every peer at `epoch`, as long as `own` each; returns (world_size, length of `own`) with
        `own` as this rank's row.
        """

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: Vector) -> Vector:
        """Sum over ranks of what each published to the slot at `epoch`, in the fixed binary tree (`reference.tree_sum`)."""

    def all_reduce(self, mailbox: str, slot: int, epoch: int, values: Vector) -> Vector:
        """Blocking reduction: publish, then `delayed_reduce` of the same slot and epoch."""

    def all_gather(self, mailbox: str, slot: int, epoch: int, values: Vector) -> NDArray[np.float32]:
        """Blocking gather: publish, then collect; (world_size, length), equal on all ranks."""

    def barrier(self) -> None:
        """Return when every rank has called it as often as this rank has."""

    def close(self) -> None:
        """Unmap the peers' heaps, then free the own one. Call after a barrier or an abort."""


class CommunicatorFactory(Protocol):
    """Makes the communicator of a rank. Collective: every rank calls it, with equal mailboxes."""

    def __call__(self, mailboxes: Sequence[MailboxSpec]) -> Communicator:
        """Allocate, export, open the peers. Raises RendezvousTimeout naming the ranks that never came."""
