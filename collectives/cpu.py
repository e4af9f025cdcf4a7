"""KCCL for CPU ranks of one host: values are pushed into the peers' heaps, waits poll local memory only.

All the coordination is in the words (see `words`): there is no lock, no counter to reset, and a slot may be rewritten as soon as
the plan can prove that everyone has consumed it (2d + 2 slots for delay d).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kog_dist.collectives import words
from kog_dist.collectives.api import MailboxSpec, Vector
from kog_dist.collectives.fault import Fault
from kog_dist.collectives.heap import SymmetricHeap
from kog_dist.collectives.mailbox import BARRIER, Mailbox, fingerprint, place
from kog_dist.collectives.reference import tree_sum
from kog_dist.errors import DeviceError
from kog_dist.runtime.abi import WaitOp, WaitRecord
from kog_dist.runtime.control import ControlPage, EpochWaits
from kog_dist.runtime.topology import Rendezvous
from kog_dist.runtime.wait import Deadline, WaitResult, wait


class _Box:
    """One mailbox with its views: where this rank's values go on every peer, and where the peers' values arrive here."""

    def __init__(self, heap: SymmetricHeap, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.length = mailbox.spec.length * mailbox.spec.most
        rank, world_size = heap.rank, mailbox.world_size
        peers = [(rank + step) % world_size for step in range(1, world_size)]  # everybody starts with another peer
        slot_words = world_size * mailbox.row_words
        self.outgoing: list[list[words.Words]] = []
        self.incoming: list[words.Words] = []
        self.first_words: list[list[int]] = []
        for slot in range(mailbox.spec.num_slots):
            row = mailbox.row(slot, rank)
            self.outgoing.append([heap.peer_view(peer, row * words.WORD_BYTES, self.length) for peer in peers])
            rows = heap.peer_view(rank, mailbox.row(slot, 0) * words.WORD_BYTES, slot_words)
            self.incoming.append(rows.reshape(world_size, mailbox.row_words)[:, : self.length])
            self.first_words.append([mailbox.row(slot, peer) for peer in peers])
        self.stripped = np.zeros((world_size, self.length), np.uint64)

    def views(self, slot: int, length: int) -> tuple[words.Words, words.Words]:
        """Of messages of this length: where they arrive, and where their words go without tags."""
        incoming, stripped = self.incoming[slot], self.stripped
        return (incoming, stripped) if length == self.length else (incoming[:, :length], stripped[:, :length])


class CpuCommunicator:
    """The `Communicator` of a CPU rank. Not for several threads. See `api.Communicator` for what the methods mean.

    The first wait that does not end well is the last: afterwards every method raises AbortedError and nothing is published.
    `waits` counts the collects that had to wait, barriers apart; who made the communicator may start it anew.
    """

    def __init__(
        self, heap: SymmetricHeap, mailboxes: list[Mailbox], control: ControlPage, *, timeout_s: float, epoch_bits: int
    ) -> None:
        self.rank = heap.rank
        self.world_size = mailboxes[0].world_size
        self.waits = EpochWaits()
        self.explain: Callable[[WaitRecord], WaitRecord] = lambda record: record  # may add what a wait was for
        self._heap = heap
        self._control = control
        self._timeout_s = timeout_s
        self._tag = words.EpochTag(epoch_bits)
        self._local = heap.own_words()
        self._boxes = {mailbox.spec.name: _Box(heap, mailbox) for mailbox in mailboxes}
        self._num_barriers = 0
        # Ranks that share cores give way after one look: with 8 ranks on 2 cores that halves the time of an all_reduce.
        self._spins = 64 if self.world_size < len(os.sched_getaffinity(0)) else 1
        self._fault = Fault(heap.rank, control)

    @classmethod
    def create(
        cls,
        mailboxes: Sequence[MailboxSpec],
        *,
        rendezvous: Rendezvous,
        control: ControlPage,
        deadline: Deadline,
        timeout_s: float = 30.0,
        epoch_bits: int = words.TAG_BITS,
    ) -> CpuCommunicator:
        """Collective: every rank calls it with equal mailboxes (ConfigError otherwise); `deadline` bounds the meeting.

        `timeout_s` bounds every later wait. Bind all but the mailboxes with functools.partial to get a CommunicatorFactory.
        """
        world_size = rendezvous.world_size
        placed = place([*mailboxes, BARRIER], world_size)
        num_words = placed[-1].first_word + placed[-1].num_words
        heap = SymmetricHeap.create(
            num_words * words.WORD_BYTES,
            rendezvous,
            deadline,
            generation=control.generation,
            fingerprint=fingerprint(mailboxes, world_size, epoch_bits),
        )
        return cls(heap, placed, control, timeout_s=timeout_s, epoch_bits=epoch_bits)

    def publish(self, mailbox: str, slot: int, epoch: int, values: Vector) -> None:
        """Push `values` to every peer; AbortedError when the engine is being stopped."""
        self._publish(self._box(mailbox), slot, epoch, values)

    def collect(self, mailbox: str, slot: int, epoch: int, own: Vector) -> NDArray[np.float32]:
        """Every rank's values of the epoch, (world_size, length); a new array."""
        return self._collect(self._box(mailbox), slot, epoch, own, WaitOp.COLLECT)

    def delayed_reduce(self, mailbox: str, slot: int, epoch: int, own: Vector) -> Vector:
        """Sum over ranks, in the tree of `reference.tree_sum`."""
        return tree_sum(self.collect(mailbox, slot, epoch, own))

    def all_reduce(self, mailbox: str, slot: int, epoch: int, values: Vector) -> Vector:
        """Publish and reduce in one call."""
        self.publish(mailbox, slot, epoch, values)
        return self.delayed_reduce(mailbox, slot, epoch, values)

    def all_gather(self, mailbox: str, slot: int, epoch: int, values: Vector) -> NDArray[np.float32]:
        """Publish and collect in one call."""
        self.publish(mailbox, slot, epoch, values)
        return self.collect(mailbox, slot, epoch, values)

    def barrier(self) -> None:
        """Return when every rank has come as often as this one."""
        box = self._box(BARRIER.name)
        self._num_barriers += 1
        slot = self._num_barriers % BARRIER.num_slots
        nothing = np.zeros(1, np.float32)
        self._publish(box, slot, self._num_barriers, nothing)
        self._collect(box, slot, self._num_barriers, nothing, WaitOp.BARRIER)

    def close(self) -> None:
        """Unmap everything. Later calls raise AbortedError; closing twice is harmless."""
        if not self._boxes:
            return
        self._fault.text = self._fault.text or "its communicator is closed"
        self._boxes.clear()
        self._local.release()
        self._heap.close()

    def _box(self, name: str) -> _Box:
        if self._fault.text:
            self._fault.stop(f"mailbox {name!r} alone")
        return self._boxes[name]

    def _publish(self, box: _Box, slot: int, epoch: int, values: Vector) -> None:
        box.mailbox.check(slot, values)
        tag = self._tag.of(epoch)
        if self._control.aborted():
            self._fault.stop(f"publishing epoch {epoch} to mailbox {box.mailbox.spec.name!r}")
        packed = words.pack(values, tag)
        for row in box.outgoing[slot]:
            words.store(row if len(packed) == box.length else row[: len(packed)], packed)

    def _collect(self, box: _Box, slot: int, epoch: int, own: Vector, op: WaitOp) -> NDArray[np.float32]:
        box.mailbox.check(slot, own)
        tag = self._tag.of(epoch)
        arrived = self._arrival(box, slot, tag, len(own))
        if not arrived():
            self._wait(arrived, box, slot, epoch, op, len(own))
        values = words.payload(box.views(slot, len(own))[1])
        values[self.rank] = own
        return values

    def _wait(self, arrived: Callable[[], bool], box: _Box, slot: int, epoch: int, op: WaitOp, length: int) -> None:
        """Wait for what was not there at the first look, and count it."""
        started_ns = time.monotonic_ns()
        result = wait(
            arrived,
            aborted=self._control.aborted,
            deadline=Deadline.after(self._timeout_s),
            on_poll=lambda: self._control.beat(self.rank),
            spins=self._spins - 1,  # the first look was one of them
        )
        elapsed_ns = time.monotonic_ns() - started_ns
        if result is WaitResult.ABORT:
            self._fault.stop(f"waiting for epoch {epoch} of mailbox {box.mailbox.spec.name!r}")
        if result is WaitResult.TIMEOUT:
            record = self.explain(self._record(box, slot, self._tag.of(epoch), op, elapsed_ns, length))
            self._fault.text = "a wait had run out of time"
            self._control.request_abort(self.rank, record)
            raise DeviceError(record)
        if op is WaitOp.COLLECT:
            self.waits.num_epochs += 1
            self.waits.waited_ns += elapsed_ns

    def _arrival(self, box: _Box, slot: int, tag: int, length: int) -> Callable[[], bool]:
        """A poll that looks at one word per peer until all have come, and only then takes and checks everything."""
        local, rank, (incoming, stripped) = self._local, self.rank, box.views(slot, length)
        pending = [first + length - 1 for first in box.first_words[slot]]

        def arrived() -> bool:
            while pending:
                if local[pending[-1]] >> words.TAG_BITS != tag:
                    return False
                pending.pop()
            words.strip(incoming, tag, out=stripped)
            stripped[rank] = 0  # nobody writes the own row
            return words.all_tagged(stripped)

        return arrived

    def _record(self, box: _Box, slot: int, tag: int, op: WaitOp, elapsed_ns: int, length: int) -> WaitRecord:
        seen = words.tags(box.views(slot, length)[0])
        missing = seen != tag
        missing[self.rank] = False
        places = np.argwhere(missing)
        peer, column = places[0].tolist() if len(places) else (self.rank, 0)  # all came since the last look
        return WaitRecord(
            rank=self.rank,
            op=op,
            mailbox=box.mailbox.index,
            slot=slot,
            peer=peer,
            num_missing=len(places),
            epoch_wanted=tag,
            epoch_seen=int(seen[peer, column]),
            elapsed_ns=elapsed_ns,
            label=box.mailbox.spec.name,
        )
