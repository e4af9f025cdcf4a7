"""`kog-bench drafts`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import Model, counts_of
from kog_dist.errors import ConfigError


def drafts(
    model: Model = None,
    ranks: Annotated[str, typer.Option(help="Numbers of CPU ranks: 1,2. Default: 1,2.")] = "",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs instead: 1,2.")] = "",
    repeats: Annotated[int, typer.Option(help="Answers with and without drafts, in turn; the medians count.")] = 3,
    kinds: Annotated[str, typer.Option(help="Kinds of tasks, with commas: json with a schema,prose. None: all.")] = "",
) -> None:
    """Speed of answers with drafts and without. Edits, quotes, JSON, tool calls, prose. Code 1: one was another."""
    from kog_dist.bench.engine import drafts as benchmark

    if ranks and gpus:
        raise ConfigError("--ranks and --gpus exclude each other: a GPU has one rank")
    counts = counts_of(gpus, "--gpus") if gpus else counts_of(ranks or "1,2")
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    chosen = [part for part in kinds.split(",") if part]
    if not benchmark.run(model, counts, repeats=repeats, kinds=chosen, on_gpus=bool(gpus)):
        raise typer.Exit(1)
