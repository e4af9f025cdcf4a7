"""`kog-bench soak`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def soak(
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 10_000,
    ranks: Annotated[int, typer.Option(help="Rank processes: 1, 2 or 4.")] = 2,
    gpus: Annotated[int, typer.Option(help="GPUs instead of CPU ranks.")] = 0,
    clients: Annotated[int, typer.Option(help="Clients that ask at the same time.")] = 6,
    seed: Annotated[int, typer.Option(help="Another seed: other requests.")] = 1,
) -> None:
    """Mixed requests, cancels, disconnects, deadlines; each stream against a replay. Code 1: something was wrong."""
    from kog_dist.bench import soak as benchmark

    if requests < 2 or clients < 1 or gpus < 0:
        raise ConfigError("--requests must be at least 2, --clients at least 1, --gpus at least 0")
    if not benchmark.run(requests, gpus or ranks, clients, seed, on_gpus=gpus > 0):
        raise typer.Exit(1)
