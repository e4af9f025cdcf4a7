"""Whether clients still find an engine under its name: somebody may remove its folder while it runs, or files in it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Final

from kog_dist.rpc.paths import SOCKET_NAME
from kog_dist.runtime.instance import Instance

LOOK_EVERY_S: Final = 0.5
_REMEDY: Final = (
    "a logout removes /run/user/UID, unless there was a `loginctl enable-linger`, and cleaners of /tmp remove old files: set "
    "XDG_RUNTIME_DIR to a folder that stays"
)


class InstanceWatch:
    """Looks at the folder of an instance that this process holds."""

    def __init__(self, instance: Instance, clock: Callable[[], float] = time.monotonic) -> None:
        self._instance, self._clock = instance, clock
        self._next_look_s = 0.0
        self._missed_s: float | None = None  # when the socket file was not there for the first time

    def look(self, beat_age_s: float = math.inf) -> str | None:
        """A sentence once no client could find the engine, or it would find another one. Call it as often as you like.

        `beat_age_s`: of the process that has made the socket file, once it has. It removes the file at its end, and beats no
        more then; so the file was removed by somebody else if there are beats after it was missed.
        """
        now_s = self._clock()
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + LOOK_EVERY_S
        what = self._instance.loss()
        if what is None and beat_age_s < math.inf:
            what = self._socket_loss(now_s, beat_age_s)
        if what is None:
            return None
        return f"{what}; the engine was stopped ({_REMEDY})"

    def _socket_loss(self, now_s: float, beat_age_s: float) -> str | None:
        path, is_there = self._instance.folder / SOCKET_NAME, True
        with contextlib.suppress(OSError):  # the file system does not say
            is_there = path.exists()
        if is_there:
            self._missed_s = None
        elif self._missed_s is None:
            self._missed_s = now_s
        elif beat_age_s < now_s - self._missed_s:
            return f"the socket file {path} was removed while the engine ran, so no client could reach it"
        return None
