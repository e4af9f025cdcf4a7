"""`kog-bench drafts`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.commands.options import Model, counts_of
from kog_dist.errors import ConfigError


def drafts(
    model: Model = None,
    ranks: Annotated[str, typer.Option(help="Rank counts to measure: 1,2.")] = "1,2",
    repeats: Annotated[int, typer.Option(help="Answers with and without drafts, in turn; the medians count.")] = 3,
    kinds: Annotated[str, typer.Option(help="Kinds of tasks, with commas: json with a schema,prose. None: all.")] = "",
) -> None:
    """Speed of answers with drafts and without, on CPU ranks. Edits, quotes, JSON, tool calls, prose. Code 1: one was another."""
    from kog_dist.bench.engine import drafts as benchmark

    counts = counts_of(ranks)
    if repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {repeats}")
    if not benchmark.run(model, counts, repeats=repeats, kinds=[part for part in kinds.split(",") if part]):
        raise typer.Exit(1)
