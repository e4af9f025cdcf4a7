"""Whether an engine's coordinator takes requests: an answer of its own, since a socket file says only that it was bound."""

from __future__ import annotations

import contextlib
import select
from typing import Final

from kog_dist.errors import KogError
from kog_dist.rpc.file_end import EndLost, FileEnd
from kog_dist.rpc.messages import BadMessage, EngineState, Status, StatusReport, decode_event, encode
from kog_dist.runtime.wait import Deadline

ANSWER_S: Final = 0.01  # to wait for an answer that is likely; a coordinator that still loads is asked again at the next call


class ReadinessProbe:
    """Asks for the status until it is `ready`; from then on it asks nobody."""

    def __init__(self, address: str) -> None:
        """`address`: of the socket file, which need not be there yet."""
        self._address = address
        self._end: FileEnd | None = None
        self._is_ready = False

    def is_ready(self) -> bool:
        """Whether the coordinator has said so by now. Takes no longer than ANSWER_S."""
        if not self._is_ready:
            with contextlib.suppress(KogError, EndLost, BadMessage):
                self._is_ready = self._ask()
                if self._end is not None and not self._is_ready:
                    return False
            self.close()  # it has answered, or is gone: the next call begins anew
        return self._is_ready

    def _ask(self) -> bool:
        if self._end is None:
            self._end = FileEnd(self._address)
            self._end.send(encode(Status()))
        end, deadline = self._end, Deadline.after(ANSWER_S)
        while select.select([end.fileno()], [], [], deadline.remaining_s())[0]:  # the greetings of both ends, then the answer
            if (frame := end.receive()) is None:
                continue
            event = decode_event(frame)
            if isinstance(event, StatusReport):
                end.send(encode(Status()))
                return event.state is EngineState.READY
        return False

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._end is not None:
            self._end.close()
            self._end = None
