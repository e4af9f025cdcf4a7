"""How far a run is: a bar with rate and time left on a terminal, lines elsewhere."""

from __future__ import annotations

import math
import sys
from types import TracebackType

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class RunDisplay:
    """Prints lines to standard output, and on a terminal keeps a bar below them up to date (standard error)."""

    def __init__(self, *, silent: bool = False) -> None:
        """`silent`: show nothing, for all ranks but the first."""
        self._silent = silent
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=silent or not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, rate="")

    def __enter__(self) -> RunDisplay:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Print one line."""
        if self._silent:
            return
        if not self._bar.disable and sys.stdout.isatty():
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)  # above the bar
        else:
            typer.echo(text)

    def advanced(self, step: int, num_steps: int | None, tokens_per_s: float) -> None:
        """Move the bar; see `Run.train`."""
        self._bar.update(self._task, completed=step, total=num_steps, rate=f"{tokens_per_s:,.0f} tokens/s")


def duration(seconds: float) -> str:
    """`2:05`, or `1:02:05`; `?` if it is not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def nothing(line: str) -> None:
    """A `report` that shows nothing."""
