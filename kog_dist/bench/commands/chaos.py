"""`kog-bench chaos`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.config import MAX_PARALLEL
from kog_dist.errors import ConfigError


def chaos(
    seconds: Annotated[float, typer.Option(help="How long.")] = 3600.0,
    ranks: Annotated[int, typer.Option(help="Rank processes of the single engine: 1, 2 or 4.")] = 2,
    parallel: Annotated[int, typer.Option(help="Requests that an engine decodes together while a fault comes, 1 to 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Another seed: another order.")] = 1,
    output: Annotated[Path, typer.Option(help="File for the JSON object.")] = Path("chaos.json"),
    only: Annotated[str, typer.Option(help="Cells that have this in their names, such as 'rank 0 stop'.")] = "",
) -> None:
    """Kill, stop, terminate and pause every role at every point. Code 1: a promise was broken."""
    from kog_dist.bench.chaos import run as benchmark
    from kog_dist.bench.chaos.table import cells

    if seconds <= 0 or ranks not in (1, 2, 4) or not 1 <= parallel <= MAX_PARALLEL:
        raise ConfigError(f"--seconds must be positive, --ranks 1, 2 or 4, --parallel 1 to {MAX_PARALLEL}")
    if not any(only in str(cell) for cell in cells()):
        raise ConfigError(f"--only {only!r}: no cell has this in its name; one is called {next(cells())}")
    if not benchmark.run(seconds, ranks, seed, output, only, parallel):
        raise typer.Exit(1)
