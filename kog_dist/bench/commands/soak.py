"""`kog-bench soak`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def soak(
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 10_000,
    ranks: Annotated[int | None, typer.Option(help="CPU ranks: 1, 2 or 4. Default: 2.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs instead of CPU ranks.")] = None,
    clients: Annotated[int, typer.Option(help="Clients that ask at the same time.")] = 6,
    long: Annotated[
        bool, typer.Option("--long", help="Long prompts, room for few kept prefixes; on GPUs an INT4 KV cache.")
    ] = False,
    demo: Annotated[bool, typer.Option("--demo", help="With --long: the demo model, which is slower than a tiny one.")] = False,
    delta_nets: Annotated[
        bool, typer.Option("--delta-nets", help="A model with gated delta nets: kept states, longer prompts.")
    ] = False,
    drafts: Annotated[
        bool,
        typer.Option("--drafts", help="Ask again with answers, right or wrong, as predictions; replays draft nothing."),
    ] = False,
    kv_dtype: Annotated[str | None, typer.Option(help="Format of the KV cache; not with --long or --delta-nets.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed: other requests.")] = 1,
) -> None:
    """Thousands of mixed requests, each against a replay. Also cancels, disconnects, deadlines. Code 1: something was wrong."""
    from kog_dist.bench.engine import soak as benchmark

    if ranks is not None and gpus is not None:
        raise ConfigError("--ranks and --gpus exclude each other: a GPU has one rank")
    if requests < 2 or min(count for count in (clients, ranks, gpus) if count is not None) < 1:
        raise ConfigError("--requests must be at least 2, --clients, --ranks and --gpus at least 1")
    if demo and (not long or gpus is not None):
        raise ConfigError("--demo goes with --long, on CPU ranks; add --long, or leave --gpus out")
    if delta_nets and long:
        raise ConfigError("--delta-nets has long prompts of its own; leave out --long")
    if kv_dtype is not None and (long or delta_nets):
        raise ConfigError("--long and --delta-nets have KV caches of their own; leave --kv-dtype out")
    num_ranks = gpus or ranks or 2
    if delta_nets:
        of_device = benchmark.SoakedEngine.delta_nets if gpus is None else benchmark.SoakedEngine.delta_nets_on_gpus
        engine = of_device(num_ranks)
    elif not long:
        engine = benchmark.SoakedEngine.tiny(on_gpus=gpus is not None, repeats=drafts)
    elif gpus is not None:
        engine = benchmark.SoakedEngine.long_on_gpus(gpus)
    else:
        engine = benchmark.SoakedEngine.long(num_ranks, requests, is_demo=demo)
    if kv_dtype is not None:
        engine = replace(engine, flags=(*engine.flags, f"--kv-dtype={kv_dtype}"))
    if not benchmark.run(replace(engine, repeats=drafts), requests, num_ranks, clients, seed):
        raise typer.Exit(1)
