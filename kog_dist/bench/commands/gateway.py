"""`kog-bench gateway`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def gateway(
    rate: Annotated[float, typer.Option(help="Tokens per second.")] = 2000.0,
    tokens: Annotated[int, typer.Option(help="Tokens per answer.")] = 4000,
    repeats: Annotated[int, typer.Option(help="Answers over each way, in turns.")] = 3,
) -> None:
    """Microseconds of a token to a client, by RPC and HTTP. From a fake engine; needs no model."""
    from kog_dist.bench.service import gateway_path as benchmark

    if not 0 < rate <= 1e5 or not 2 <= tokens <= 30_000 or repeats < 1:
        raise ConfigError("--rate must be more than 0 and at most 100000, --tokens from 2 to 30000, --repeats at least 1")
    benchmark.run(rate, num_tokens=tokens, repeats=repeats)
