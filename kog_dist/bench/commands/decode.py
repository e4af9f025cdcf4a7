"""`kog-bench decode`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.files import writing
from kog_dist.bench.options import Model, Output, counts_of, speculation_of
from kog_dist.errors import ConfigError


def decode(
    model: Model = None,
    ranks: Annotated[str, typer.Option(help="Rank counts to measure: 1,8.")] = "1,8",
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 256,
    repeats: Annotated[int, typer.Option(help="Requests per rank count; the median counts.")] = 5,
    idle_s: Annotated[float, typer.Option(help="Seconds over which idle ranks are watched.")] = 5.0,
    speculate: Annotated[str, typer.Option(help="Drafts of later tokens: off, lookup or auto.")] = "off",
    output: Output = None,
) -> None:
    """Speed of one request on CPU ranks. Also time to be ready, and what idle ranks cost."""
    from kog_dist.bench.engine import decode as benchmark

    counts, drafts = counts_of(ranks), speculation_of(speculate)
    if tokens < 2 or repeats < 1 or not idle_s > 0:
        raise ConfigError("--tokens must be at least 2, --repeats at least 1, --idle-s more than 0")
    with writing(output):
        benchmark.run(model, counts, num_tokens=tokens, repeats=repeats, idle_s=idle_s, speculate=drafts)
