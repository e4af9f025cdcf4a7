"""What start-up waits for, shown while it lasts: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from kog_dist.launch.events import is_terminal, say
from kog_dist.quoting import quoted
from kog_dist.records import dataclass
from kog_dist.runtime.control import ControlPage, RankState
from kog_dist.runtime.startup import DOING, StartReport, StartStage, StartTeller

_ENDED: Final = {RankState.READY: "ready", RankState.RUNNING: "running", RankState.STOPPED: "stopped", RankState.FAILED: "failed"}
_ON_TERMINAL_AFTER_S = 0.3  # shorter start-ups show nothing
_ON_TERMINAL_EVERY_S = 0.1
_LINES_AFTER_S = 10.0  # a log wants no line for an ordinary start-up
_LINES_UNDER_STARTER_AFTER_S = 1.0  # mpirun and Ray hide the terminal at which somebody waits
_LINES_EVERY_S = 2.0
_SAME_LINE_AGAIN_S = 30.0  # so that a log shows that something goes on, and how far it is
_ERASE = "\r\x1b[2K"
_BAR_CELLS, _BLOCK_CELLS = 20, 5


@dataclass(frozen=True, slots=True)
class RankStart:
    """Where a rank is on its way to be ready."""

    state: RankState
    report: StartReport

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.state in (RankState.READY, RankState.RUNNING)

    @property
    def doing(self) -> str:
        """In words."""
        return _ENDED.get(self.state, DOING[self.report.stage])


def starts_of(control: ControlPage) -> list[RankStart]:
    """Of all ranks."""
    return [RankStart(control.state(rank), control.startup(rank)) for rank in range(control.world_size)]


@dataclass(frozen=True, slots=True)
class AwaitedStage:
    """What start-up waits for. `share`: how much of it is done, None where nobody knows."""

    text: str
    doing: str = ""  # the same without the names of ranks
    share: float | None = None


def waiting_for(starts: Sequence[RankStart]) -> AwaitedStage:
    """`waiting for rank 3: loading and packing weights`: the ranks that are furthest behind, on which the others wait."""
    behind = min(((start.state, start.report.stage) for start in starts if start.state < RankState.READY), default=None)
    if behind is None:
        return AwaitedStage("waiting for the coordinator: opening its socket")
    found = {rank: start for rank, start in enumerate(starts) if (start.state, start.report.stage) == behind}
    ranks, doing = list(found), next(iter(found.values())).doing
    if len(ranks) == 1:
        names = f"rank {ranks[0]}"
    elif ranks == list(range(ranks[0], ranks[-1] + 1)):
        names = f"ranks {ranks[0]} to {ranks[-1]}"
    else:
        names = f"ranks {', '.join(map(str, ranks))}"
    shares = [start.report.share for start in found.values()]
    known = [share for share in shares if share is not None]
    return AwaitedStage(f"waiting for {names}: {doing}", doing, min(known) if len(known) == len(shares) else None)


def bar(share: float | None, elapsed_s: float) -> str:
    """`[#####---------------]  25 %`; without a share a block that moves by four cells a second."""
    if share is not None:
        done = int(share * _BAR_CELLS)
        return f"[{'#' * done}{'-' * (_BAR_CELLS - done)}] {100 * share:3.0f} %"
    way = _BAR_CELLS - _BLOCK_CELLS
    begin = way - abs(int(4 * elapsed_s) % (2 * way) - way)
    return f"[{'-' * begin}{'#' * _BLOCK_CELLS}{'-' * (way - begin)}]      "


class StartupProgress:
    """Say as often as you like what is waited for, then `clear`. Remembers how long each thing took."""

    def __init__(self, *, under_starter: bool = False, live_after_s: float = _ON_TERMINAL_AFTER_S) -> None:
        """`under_starter`: a program such as mpirun stands between this process and the user's terminal. `live_after_s`: on a
        terminal what is over earlier is not shown.
        """
        self._is_live = is_terminal("stderr") and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._last_s = self._since_s = time.monotonic()
        self._next_s = self._last_s + (
            live_after_s if self._is_live else _LINES_UNDER_STARTER_AFTER_S if under_starter else _LINES_AFTER_S
        )
        self._again_s = 0.0
        self._text = self._doing = self._shown = ""
        self._took_s: dict[str, float] = {}

    def show(self, text: str, *, doing: str = "", share: float | None = None) -> None:
        """Show it if it is time to. `doing`: under which name its time counts, if not as it is; `share`: see `AwaitedStage`."""
        now_s = time.monotonic()
        self._count(now_s)
        if text != self._text:
            self._since_s = now_s
        self._text, self._doing = text, doing or text
        if now_s < self._next_s:
            return
        if self._is_live:
            elapsed_s = now_s - self._since_s
            self._next_s = now_s + _ON_TERMINAL_EVERY_S
            self._shown = quoted(f"kog-launch: {bar(share, elapsed_s)} {text.removeprefix('waiting for ')}, {elapsed_s:.0f} s")
            self._write(f"{_ERASE}{self._shown[: shutil.get_terminal_size().columns - 1]}")
        elif text != self._shown or now_s >= self._again_s:
            self._next_s, self._again_s = now_s + _LINES_EVERY_S, now_s + _SAME_LINE_AGAIN_S
            self._shown = text
            say(f"kog-launch: {text}{'' if share is None else f' ({share:.0%} done)'}", error=True)

    def clear(self) -> None:
        """Remove the line from the terminal; nothing is waited for any more."""
        self._count(time.monotonic())
        self._text = self._doing = ""
        if self._is_live and self._shown:
            self._write(_ERASE)
            self._shown = ""

    def summary(self) -> str:
        """`loading and packing weights 3.1 s, ...`: what was waited for, and for how long; what took no time is left out."""
        return ", ".join(f"{doing} {took_s:.1f} s" for doing, took_s in self._took_s.items() if took_s >= 0.05)

    def _count(self, now_s: float) -> None:
        if self._doing:
            self._took_s[self._doing] = self._took_s.get(self._doing, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


@contextmanager
def compilers_shown() -> Iterator[None]:
    """Around what may compile in this very process, and says nothing until it has: a terminal shows it while it lasts."""
    progress = StartupProgress(live_after_s=0.0)

    def tell(report: StartReport) -> None:
        if report.stage is StartStage.COMPILING:
            progress.show(DOING[report.stage])
        else:
            progress.clear()

    with StartTeller(tell).hearing_compilers():
        yield
