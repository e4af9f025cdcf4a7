"""The coordinator's grip on the ranks: one request at a time through the control page, its tokens back through the ring."""

from __future__ import annotations

from kog_dist.control import ControlPage, DecodeRequest
from kog_dist.decode.ring import Finish, TokenEntry
from kog_dist.wait import Deadline

MAX_ENTRIES = 64  # of one read, so that an event stays small and the loop responsive


class DecodeSlot:
    """Occupied from `submit` until the ranks' last entry, also when nobody wants the tokens any more."""

    def __init__(self, control: ControlPage) -> None:
        self._control = control
        self._seq: int | None = None
        self._next_index = 0

    @property
    def busy(self) -> bool:
        """Whether ranks may still write entries of the current request."""
        return self._seq is not None

    def may_submit(self) -> bool:
        """Whether the next request may be handed over: request blocks are two, used in turn."""
        newest = self._control.doorbell()
        return not self.busy and (newest < 2 or self._control.all_done(newest - 1))

    def submit(self, request: DecodeRequest) -> None:
        """Hand a request to the ranks. The slot must be free."""
        assert not self.busy, "the ranks decode one request at a time"
        self._seq = self._control.submit(request)
        self._next_index = 0

    def cancel(self) -> None:
        """Ask the ranks to end the current request early; the slot stays busy until they have."""
        if self._seq is not None:
            self._control.cancel(self._seq)

    def wait(self, timeout_s: float) -> None:
        """Block until the next entry is there, at most `timeout_s`."""
        if self._seq is not None:
            self._control.ring.wait(self._seq, self._next_index, Deadline.after(timeout_s))

    def read(self) -> list[TokenEntry]:
        """The next entries that have come, in order, at most MAX_ENTRIES. The last entry of a request frees the slot."""
        entries: list[TokenEntry] = []
        while self._seq is not None and len(entries) < MAX_ENTRIES:
            entry = self._control.ring.get(self._seq, self._next_index)
            if entry is None:
                break
            entries.append(entry)
            self._next_index += 1
            if entry.finish is not Finish.NONE:
                self._seq = None
        return entries
