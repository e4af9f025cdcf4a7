"""`kog-bench faults`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import Model
from kog_dist.errors import ConfigError


def faults(
    model: Model = None,
    ranks: Annotated[int, typer.Option(help="Rank processes.")] = 4,
    kills: Annotated[int, typer.Option(help="Kills of each kind of process.")] = 20,
) -> None:
    """Kill every kind of process during a stream. Time to the client's error, and until nothing is left."""
    from kog_dist.bench.engine import faults as benchmark

    for option, number in (("--ranks", ranks), ("--kills", kills)):
        if number < 1:
            raise ConfigError(f"{option} must be at least 1, got {number}")
    benchmark.run(model, ranks, kills)
