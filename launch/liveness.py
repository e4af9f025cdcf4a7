"""Whether a process that runs still gives signs of life. One rule for all roles:

- one that the system has stopped (SIGSTOP, a debugger) is silent from the moment the launcher sees it so. The kernel says it: no
  Python can hold that up, and no load looks like it;
- one whose loop does not go round is silent since its last heartbeat. A loop may be busy for a while, so it has a longer limit.
  The time in which it waits for a core does not count: on a machine with more to do than it has cores, that is no fault.

What the launcher misses while it is held up itself counts for nobody.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from kog_dist.launch.local import Child
from kog_dist.launch.process import EngineProcess
from kog_dist.records import dataclass
from kog_dist.runtime.process_page import ProcessPage

LOOP_STALL_FACTOR: Final = 5  # times --stall-timeout: a loop may be busy with messages on a loaded machine
HELD_UP_S: Final = 0.4  # without a look, or half of the limit: this process itself was held up


@dataclass(frozen=True, slots=True)
class Silence:
    """How long a process has given no sign of life, and whether it is stopped."""

    for_s: float
    is_stopped: bool

    def __str__(self) -> str:
        return f"gave no sign of life for {self.for_s:.2f} s{' (it was stopped, by SIGSTOP or a debugger)' * self.is_stopped}"


class Vigil:
    """Looks at one process, often: every 0.1 s or more."""

    def __init__(self, process: EngineProcess, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`stall_s`: --stall-timeout."""
        self.process = process
        self._stall_s, self._clock = stall_s, clock
        self._looked_s = clock()
        self._stopped_s: float | None = None  # since when it is seen stopped
        self._held_up_until_s = -math.inf  # when this process was held up last, and how long altogether since the last beat
        self._held_up_s = 0.0
        self._had_s = process.core_use().had_s  # seconds of cores, at the last look
        self._waits: deque[tuple[float, float]] = deque()  # since the last beat: when a look found that it had waited for a core

    def look(self, beat_age_s: float = 0.0, beat_limit_s: float = math.inf) -> Silence | None:
        """Its silence once that has lasted too long. Of a loop that beats: the age of its beat, and what that may be."""
        now_s = self._clock()
        missed_s = now_s - self._looked_s
        was_held_up = missed_s > min(HELD_UP_S, self._stall_s / 2)
        self._looked_s = now_s
        if now_s - beat_age_s > self._held_up_until_s:
            self._held_up_s = 0.0
        if was_held_up:
            self._held_up_s += min(missed_s, beat_age_s)
            self._held_up_until_s = now_s
        self._see_core_use(now_s - beat_age_s, now_s, 0.0 if was_held_up else missed_s)
        if not self.process.is_stopped():
            self._stopped_s = None
        elif self._stopped_s is None:
            self._stopped_s = now_s
        elif was_held_up:
            self._stopped_s += missed_s
        if was_held_up:
            return None
        if self._stopped_s is not None and now_s - self._stopped_s > self._stall_s:
            return Silence(now_s - self._stopped_s, is_stopped=True)
        silent_s = beat_age_s - self._held_up_s - max(0.0, sum(waited_s for _, waited_s in self._waits))
        return Silence(silent_s, is_stopped=False) if silent_s > beat_limit_s else None

    def _see_core_use(self, beat_s: float, now_s: float, seen_s: float) -> None:
        """Note what it has waited for a core in the last `seen_s`. The system counts cores in steps of 10 ms, so that a single
        look may find less than nothing; the sum is right.
        """
        use = self.process.core_use()
        while self._waits and self._waits[0][0] <= beat_s:
            self._waits.popleft()
        if use.wants and seen_s:
            self._waits.append((now_s, seen_s - (use.had_s - self._had_s)))
        self._had_s = use.had_s


class WatchedChild:
    """A child that beats on a page of its own, which it is killed for not doing, and that stops only when it is told to."""

    def __init__(self, start: Callable[[ProcessPage], Child], stall_s: float) -> None:
        """`start` starts the process, which inherits the page. Raises LaunchError."""
        self._page = ProcessPage.create()
        try:
            self.child = start(self._page)
        except BaseException:
            self._page.close()
            raise
        self._vigil, self._stall_s = Vigil(self.child, stall_s), stall_s
        self.silence: Silence | None = None  # for which it was killed

    def look(self) -> bool:
        """Kill it if it has been silent for too long; True when this call has done so."""
        if self.silence is not None or self.child.exit_code is not None:
            return False
        self.silence = self._vigil.look(self._page.beat_age_s(), LOOP_STALL_FACTOR * self._stall_s)
        if self.silence is not None:
            self.child.send(signal.SIGKILL)
        return self.silence is not None

    def how_it_ended(self) -> str:
        """`was killed by SIGKILL`, or why it was killed here."""
        return self.child.how_it_ended() if self.silence is None else f"{self.silence} and was killed"

    def begin_stop(self) -> None:
        """Ask it to end. A second call means: at once."""
        self._page.ask_to_stop()
        self.child.send(signal.SIGTERM)

    def kill(self) -> None:
        """End it now if it still runs, and release what belongs to it."""
        self.child.send(signal.SIGKILL)
        self.child.process.wait()
        self.child.read_output()
        self.child.close()
        self._page.close()
