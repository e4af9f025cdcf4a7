"""Why a communicator has stopped for good: the first wait that does not end well is the last."""

from __future__ import annotations

from typing import NoReturn

from kog_dist.errors import AbortedError
from kog_dist.runtime.control import ControlPage


class Fault:
    """Empty while the communicator works. Once it says something, every method goes through `stop`."""

    def __init__(self, rank: int, control: ControlPage) -> None:
        self.text = ""
        self._rank, self._control = rank, control

    def stop(self, doing: str) -> NoReturn:
        """Raise AbortedError, now and from now on. `doing`: what is given up."""
        if not self.text:
            abort = self._control.abort()
            self.text = f"the engine is being stopped ({abort[0].name.lower()})" if abort else "the engine is being stopped"
        raise AbortedError(f"rank {self._rank} left {doing}: {self.text}")
