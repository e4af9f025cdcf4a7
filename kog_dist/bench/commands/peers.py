"""`kog-bench peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.options import Output, counts_of
from kog_dist.errors import ConfigError


def peers(
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Weights for all: a Hugging Face folder, or a GGUF file. None: the bundled demo model."),
    ] = None,
    against: Annotated[
        str, typer.Option(help="Engines besides ours: vllm,sglang,llamacpp,xllamacpp,trtllm,transformers,torch.")
    ] = "",
    start: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PROGRAM",
            help="Where an engine's program is, or NAME='COMMAND LINE' with {model} and {port}. May be given several times.",
        ),
    ] = None,
    gguf: Annotated[str | None, typer.Option(metavar="FILE", help="The same weights for engines that read GGUF alone.")] = None,
    loads: Annotated[
        str, typer.Option(help="short (1,024+128 tokens), long (8,000+1,000), PROMPT+ANSWER, edit,quote,json,prose, FILE.jsonl.")
    ] = "short",
    at_once: Annotated[str, typer.Option(metavar="N[,N...]", help="Requests at a time, of loads by length.")] = "1",
    requests: Annotated[int, typer.Option(help="Requests of each load by length, times --at-once.")] = 3,
    processes: Annotated[int, typer.Option(help="How often each engine is started, in turn; medians of them.")] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each engine.")] = 0,
    threads: Annotated[int, typer.Option(help="Without GPUs: our CPU ranks, others' threads.")] = 0,
    drafts: Annotated[bool, typer.Option("--drafts/--no-drafts", help="Also with drafts that need no second model.")] = True,
    start_timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For an engine's first answer.")] = 900.0,
    output: Output = None,
) -> None:
    """Other engines beside ours. Started in turn, asked the same; greedy. Code 4: something has no figures."""
    from kog_dist.bench.files import writing
    from kog_dist.bench.peers import run as benchmark
    from kog_dist.bench.peers.loads import loads_of
    from kog_dist.bench.peers.peer import chosen
    from kog_dist.config import LaunchConfig
    from kog_dist.launch.target import model_folder

    if bool(gpus) == bool(threads) or min(gpus, threads) < 0:
        raise ConfigError("give either --gpus N or --threads N, of at least 1")
    if min(requests, processes) < 1 or not start_timeout > 0:
        raise ConfigError("--requests, --processes and --start-timeout must be at least 1")
    folder = Path(model) if model is not None else model_folder(LaunchConfig())[0]
    weights, file = benchmark.weights_of(folder, None if gguf is None else Path(gguf))
    asked = loads_of(loads, counts_of(at_once, "--at-once"), requests, benchmark.tokenizer_of(weights))
    plan = benchmark.PeerPlan(
        weights,
        file,
        chosen(against, start or ()),
        asked,
        devices=gpus or threads,
        on_gpus=bool(gpus),
        drafts=drafts,
        processes=processes,
        start_s=start_timeout,
    )
    with writing(output):
        num_missing = benchmark.run(benchmark.with_room(plan))
    if num_missing:
        raise typer.Exit(4)
