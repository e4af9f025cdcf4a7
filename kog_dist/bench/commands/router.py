"""`kog-bench router`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.errors import ConfigError


def router(
    rates: Annotated[str, typer.Option(help="Tokens per second of each stream: 230,2000.")] = "230,2000",
    tokens: Annotated[int, typer.Option(help="Tokens per stream.")] = 2000,
    streams: Annotated[int, typer.Option(help="Streams at once, each from a source of its own, beside one alone.")] = 2,
    agents: Annotated[int, typer.Option(help="Instead: agents that begin alike, and how much replicas had kept. 0: none.")] = 0,
    replicas: Annotated[int, typer.Option(help="With --agents: replicas behind the router.")] = 4,
    turns: Annotated[int, typer.Option(help="With --agents: requests of each.")] = 12,
) -> None:
    """Microseconds that the router adds to each token. It stands in front of replicas; needs no model."""
    from kog_dist.bench.engine import router as benchmark
    from kog_dist.bench.engine import router_agents

    if min(agents, replicas - 1, turns - 1) < 0:
        raise ConfigError("--agents must be at least 0, --replicas and --turns at least 1")
    if agents:
        router_agents.run(agents, replicas, turns)
        return
    if tokens < 2 or streams < 1:
        raise ConfigError("--tokens must be at least 2, --streams at least 1")
    benchmark.run(counts_of(rates, "--rates"), num_tokens=tokens, num_streams=streams)
