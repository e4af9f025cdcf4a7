"""`kog-bench endurance`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.errors import ConfigError


def endurance(
    spec: Annotated[str, typer.Option(help="Shape: 2b.")] = "2b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs.")] = "1",
    tokens: Annotated[int, typer.Option(help="Tokens to decode on each number of GPUs.")] = 100_000,
    deadline_s: Annotated[float, typer.Option(help="Longest time for each, seconds.")] = 400.0,
) -> None:
    """Very many tokens, with a hash that all ranks share. It must be the same on every number of GPUs (else code 1)."""
    from kog_dist.bench.kernel import endurance as benchmark

    if not deadline_s > 0:
        raise ConfigError("--deadline-s must be more than 0")
    raise typer.Exit(0 if benchmark.run(spec, counts_of(gpus, "--gpus"), tokens, deadline_s) else 1)
