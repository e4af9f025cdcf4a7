"""`kog-bench passes`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import Model, counts_of


def passes(
    model: Model = None,
    prompts: Annotated[str, typer.Option(help="Tokens of prompts to read: 1500,6000. None: no prompts.")] = "1500",
    kinds: Annotated[str, typer.Option(help="Kinds of tasks as of kog-bench drafts, with commas. None: no answers.")] = "prose",
) -> None:
    """What passes of several tokens bring on a CPU rank. Prompts and drafts, by processor time. Code 1: an answer was another."""
    from kog_dist.bench.engine import cpu_passes as benchmark

    lengths = counts_of(prompts, "--prompts") if prompts else ()
    if not benchmark.run(model, lengths, [part for part in kinds.split(",") if part]):
        raise typer.Exit(1)
