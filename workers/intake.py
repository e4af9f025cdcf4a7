"""How a rank takes requests over from the control page, in the order of their seq."""

from __future__ import annotations

import time

from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.stages import RankStage


class Intake:
    """Of one rank. `seq`: of the request that it took over last."""

    def __init__(self, control: ControlPage, rank: int) -> None:
        self._control, self._rank = control, rank
        self.seq = 0

    @property
    def num_new(self) -> int:
        """Requests that it has not taken over yet."""
        return self._control.doorbell() - self.seq

    def take(self) -> tuple[int, DecodeRequest]:
        """The next request and its seq; it must be there. Its block may be written again from now on.

        Raises ProtocolError for a damaged block.
        """
        control, rank, seen_ns = self._control, self._rank, time.monotonic_ns()
        self.seq += 1
        request = control.read_request(self.seq)
        if not request.only_copies:  # which come while another request has its slot
            control.stamp(rank, RankStage.SEEN, request.decode_slot, seen_ns)
            control.stamp(rank, RankStage.READ, request.decode_slot)
        control.set_read(rank, self.seq)
        return self.seq, request
