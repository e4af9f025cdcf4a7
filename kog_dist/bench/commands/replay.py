"""`kog-bench replay`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def replay(
    rate: Annotated[float, typer.Option(help="Tokens per second of each request.")] = 2000.0,
    instance: Annotated[str, typer.Option(help="Name by which clients and the gateway find it.")] = "default",
    ranks: Annotated[int, typer.Option(help="Ranks that it says it has.")] = 8,
    concurrency: Annotated[int, typer.Option(help="Requests that are answered at the same time; an engine has 1.")] = 1,
    prefill_ms: Annotated[float, typer.Option(help="Milliseconds from the start of a request to its first token.")] = 0.0,
    text: Annotated[str | None, typer.Option(metavar="FILE", help="Text to replay. Default: Python source.")] = None,
    stamps: Annotated[
        bool, typer.Option("--stamps", help="The text of each token is the moment at which it is sent (CLOCK_MONOTONIC, ns).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Model whose tokenizer and name are used. Default: the demo model.")
    ] = None,
    context: Annotated[int, typer.Option(help="Context length that it says it has.")] = 32768,
) -> None:
    """A fake engine that replays a text at a fixed rate. Until SIGTERM. A recorded agent's turns: kog-bench agents."""
    from kog_dist.bench.fakes import replay as synthetic
    from kog_dist.bench.fakes.fake_engine import FakeEngineSettings
    from kog_dist.config import LaunchConfig
    from kog_dist.launch.target import model_folder

    if not 0 < rate <= 1e6:
        raise ConfigError(f"--rate must be more than 0 and at most 1000000 tokens per second, got {rate:g}")
    if min(ranks, concurrency, context) < 1 or not prefill_ms >= 0:
        raise ConfigError("--ranks, --concurrency and --context must be at least 1, --prefill-ms at least 0")
    settings = FakeEngineSettings(instance, rate, ranks, concurrency, prefill_ms / 1e3, stamps)
    synthetic.run(settings, *model_folder(LaunchConfig(model=model)), text=text, max_context=context)
