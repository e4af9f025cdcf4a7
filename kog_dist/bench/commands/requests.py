"""`kog-bench requests`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.errors import ConfigError


def requests(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights: tiny, or on GPUs also 2b.")] = "tiny",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs: 1,2.")] = "",
    ranks: Annotated[str, typer.Option(help="Numbers of CPU ranks instead: 1,2.")] = "",
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,4000",
    kept: Annotated[int, typer.Option(help="Tokens of a prompt whose KV is kept; 0: not measured.")] = 3900,
    new: Annotated[int, typer.Option(help="Tokens behind them.")] = 50,
    context: Annotated[int, typer.Option(help="Prompt of the answers whose speed is measured.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens of these answers.")] = 400,
    repeats: Annotated[int, typer.Option(help="Requests for a figure, at least 2, but no more after some seconds.")] = 10,
    aborts: Annotated[str, typer.Option(help="When engines are aborted, one for each: prefill,decode.")] = "prefill,decode",
    prefill: Annotated[str, typer.Option(help="Prompts in chunks of tokens: auto (on 1, 2 or 4 GPUs), on or off.")] = "auto",
) -> None:
    """Whole requests, step by step. First tokens, sampling, JSON schemas, cancels, aborts. Code 1: one went wrong."""
    from kog_dist.bench.engine import requests as benchmark
    from kog_dist.bench.engine.request_measures import Workload

    during = tuple(aborts.split(","))
    if not set(during) <= set(benchmark.ABORTS):
        raise ConfigError(f"--aborts must be one or more of {', '.join(benchmark.ABORTS)}, got {aborts!r}")
    if prefill not in ("auto", "on", "off"):
        raise ConfigError(f"--prefill must be auto, on or off, got {prefill!r}")
    if bool(gpus) == bool(ranks):
        raise ConfigError("give --gpus or --ranks, one of the two")
    if min(kept, new) < 0 or min(context, repeats) < 2 or tokens < 3:
        raise ConfigError("--kept and --new must be at least 0, --context and --repeats at least 2, --tokens at least 3")
    workload = Workload(counts_of(prompts, "--prompts"), kept, new, context, tokens, repeats)
    counts = counts_of(gpus, "--gpus") if gpus else counts_of(ranks)
    if not benchmark.run(model, spec, counts, workload, on_gpus=bool(gpus), aborts=during, prefill=prefill):
        raise typer.Exit(1)
