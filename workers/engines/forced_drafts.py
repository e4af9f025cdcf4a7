"""Which tokens a grammar forces, told by the grammar process to rank 0 and by rank 0 to all: CPU ranks draft alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kog_dist.collectives.api import Communicator, MailboxSpec
from kog_dist.decode.forced import MOST_FORCED
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.wait import Deadline, wait

# Their number and ids, which float32 holds exactly. One slot: between two messages lies a pass, in which all ranks exchange.
MAILBOX: Final = MailboxSpec("forced", 1, 1 + MOST_FORCED)
_WAIT_S: Final = 0.002  # the grammar process takes a tenth of that behind a token, if it has a core; without it there is no draft


class ForcedDrafts:
    """Of one request. `comm`: None of a rank that is alone."""

    def __init__(self, request: DecodeRequest, control: ControlPage, comm: Communicator | None, rank: int) -> None:
        self._first_epoch, self._control, self._comm, self._rank = request.mask_epoch, control, comm, rank

    def next(self, index: int) -> Sequence[int]:
        """What token `index` of the answer must be, and those behind it, as far as it is known. Collective.

        Errors as of the communicator.
        """
        epoch = self._first_epoch + index
        found = self._wait(epoch) if self._rank == 0 else []
        if self._comm is None:
            return found
        values = np.zeros(MAILBOX.length, np.float32)
        values[: 1 + len(found)] = [len(found), *found]
        told = self._comm.all_gather(MAILBOX.name, 0, epoch, values)[0]
        return [int(token_id) for token_id in told[1 : 1 + int(told[0])]]

    def _wait(self, epoch: int) -> Sequence[int]:
        found: list[int] | None = None

        def ready() -> bool:
            nonlocal found
            found = self._control.forced.get(epoch)
            return found is not None

        wait(ready, aborted=self._control.aborted, deadline=Deadline.after(_WAIT_S))
        return found or []
