"""Which tokens a grammar forces, told by the grammar process to rank 0 and by rank 0 to all: CPU ranks draft alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kog_dist.collectives.api import Communicator, MailboxSpec
from kog_dist.decode.request import DecodeRequest
from kog_dist.runtime.control import ControlPage
from kog_dist.runtime.forced import MOST_FORCED
from kog_dist.runtime.wait import Deadline, wait

_NAME: Final = "forced"
_WAIT_S: Final = 0.002  # the grammar process takes a tenth of that behind a token, if it has a core; without it there is no draft


def mailbox(parallel: int) -> MailboxSpec:
    """Their number and ids, which float32 holds exactly. A slot for each request that may run: between two messages of one lies a
    pass, in which all ranks exchange.
    """
    return MailboxSpec(_NAME, parallel, 1 + MOST_FORCED)


class ForcedDrafts:
    """Of one request. `comm`: None of a rank that is alone."""

    def __init__(self, request: DecodeRequest, control: ControlPage, comm: Communicator | None, rank: int) -> None:
        self._first_epoch, self._control, self._comm, self._rank = request.mask_epoch, control, comm, rank
        self._slot = request.decode_slot

    def next(self, index: int, *, waits: bool = True) -> Sequence[int]:
        """What token `index` of the answer must be, and those behind it, as far as it is known. Collective. Rank 0 `waits` for it
        a moment, or takes what is there.

        Errors as of the communicator.
        """
        epoch = self._first_epoch + index
        found = self._found(epoch, _WAIT_S if waits else 0.0) if self._rank == 0 else []
        if self._comm is None:
            return found
        values = np.zeros(1 + MOST_FORCED, np.float32)
        values[: 1 + len(found)] = [len(found), *found]
        told = self._comm.all_gather(_NAME, self._slot, epoch, values)[0]
        return [int(token_id) for token_id in told[1 : 1 + int(told[0])]]

    def _found(self, epoch: int, wait_s: float) -> Sequence[int]:
        found: list[int] | None = None

        def ready() -> bool:
            nonlocal found
            found = self._control.forced_slots[self._slot].get(epoch)
            return found is not None

        wait(ready, aborted=self._control.aborted, deadline=Deadline.after(wait_s))
        return found or []
