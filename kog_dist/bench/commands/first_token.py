"""`kog-bench first-token`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.errors import ConfigError


def first_token(
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,4000",
    chunks_ms: Annotated[str, typer.Option(help="Milliseconds that a GPU needs for the chunks of each.")] = "1.9,4.1,15.3,30.5",
    rest_ms: Annotated[float, typer.Option(help="What is left of prefill behind them.")] = 0.13,
    head_ms: Annotated[float, typer.Option(help="From there to the first token.")] = 0.05,
    repeats: Annotated[int, typer.Option(help="Requests for a figure, at least 2, but no more after some seconds.")] = 30,
) -> None:
    """The host's way to a first token. With real coordinator and client and a fake rank: no GPU, no model."""
    from kog_dist.bench.engine import first_token as benchmark
    from kog_dist.bench.fakes.fake_rank import Play

    lengths = counts_of(prompts, "--prompts")
    try:
        times_ms = [float(word) for word in chunks_ms.split(",")]
    except ValueError:
        times_ms = []
    if len(times_ms) != len(lengths) or not all(0 < ms < 1e4 for ms in times_ms):
        raise ConfigError(f"--chunks-ms must be a number of milliseconds for each of --prompts, below 10000, got {chunks_ms!r}")
    if not (0 <= rest_ms < 1e4 and 0 <= head_ms < 1e4) or repeats < 2:
        raise ConfigError("--rest-ms and --head-ms must be from 0 to below 10000, --repeats at least 2")
    benchmark.run(Play(dict(zip(lengths, times_ms, strict=True)), rest_ms, head_ms), repeats=repeats)
