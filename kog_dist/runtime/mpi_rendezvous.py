"""The rendezvous of processes that an MPI launcher has started: point-to-point messages, polled, so that every wait has an end.

MPI's own collectives have no deadline: a peer that is dead or stuck would hold everyone in them for ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kog_dist.errors import AbortedError, RendezvousTimeout
from kog_dist.runtime.topology import timeout_text
from kog_dist.runtime.wait import Deadline, WaitResult, wait

if TYPE_CHECKING:
    from mpi4py import MPI

_NUM_TAGS = 32768  # what every MPI has at least; a round has its own tag, so that a late message is never taken for a new one


class MpiRendezvous:
    """See `Rendezvous`. Borrows the communicator and uses its tags up to 32767; nothing else may be sent on it meanwhile."""

    def __init__(self, comm: MPI.Intracomm, *, aborted: Callable[[], bool], on_poll: Callable[[], None] | None = None) -> None:
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self._comm = comm
        self._aborted = aborted
        self._on_poll = on_poll
        self._round = 0

    def all_gather_bytes(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """See `Rendezvous`. A rank that has not taken this rank's payload counts as missing, too."""
        self._round += 1
        exchange = _Exchange(self._comm, payload, self._round % _NUM_TAGS)
        started = time.monotonic()
        result = wait(exchange.advance, aborted=self._aborted, deadline=deadline, on_poll=self._on_poll, yields=200)
        if result is WaitResult.ABORT:
            raise AbortedError(f"rank {self.rank} left rendezvous {self._round} because the engine is being stopped")
        if result is WaitResult.TIMEOUT:
            missing = exchange.missing()
            raise RendezvousTimeout(missing, timeout_text(self.rank, self._round, missing, time.monotonic() - started))
        return [exchange.arrived[rank] for rank in range(self.world_size)]

    def barrier(self, deadline: Deadline) -> None:
        """See `Rendezvous`."""
        self.all_gather_bytes(b"", deadline)


class _Exchange:
    """One round. MPI needs the buffers until the messages are through; it holds them until then."""

    def __init__(self, comm: MPI.Intracomm, payload: bytes, tag: int) -> None:
        rank, world_size = comm.Get_rank(), comm.Get_size()
        self.arrived = {rank: bytes(payload)}
        self._comm, self._tag = comm, tag
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._sending = {peer: comm.Isend(payload, dest=peer, tag=tag) for peer in self._peers}
        self._receiving: dict[int, tuple[MPI.Request, bytearray]] = {}

    def advance(self) -> bool:
        """Take what has come; True when everything has come and everything was taken."""
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self._comm.Improbe(tag=self._tag, status=status)) is not None:
            buffer = bytearray(status.Get_count(MPI.BYTE))
            self._receiving[status.Get_source()] = (message.Irecv([buffer, MPI.BYTE]), buffer)
        for peer in [peer for peer, (request, _) in self._receiving.items() if request.Test()]:
            self.arrived[peer] = bytes(self._receiving.pop(peer)[1])
        for peer in [peer for peer, request in self._sending.items() if request.Test()]:
            del self._sending[peer]
        return not self.missing()

    def missing(self) -> list[int]:
        """The peers with which the exchange is not complete."""
        return [peer for peer in self._peers if peer not in self.arrived or peer in self._sending]
