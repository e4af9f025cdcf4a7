"""`kog-bench make-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def make_model(
    out: Annotated[Path, typer.Option(help="New folder for it.")],
    spec: Annotated[str, typer.Option(help="Shape: llama-3.1-8b, qwen3-4b, gpt-oss-20b, ..., or a config.json.")],
    chain: Annotated[
        list[Path] | None,
        typer.Option(help="File with a text that it writes, whatever it is asked; behind <|text_1|> that of the second."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
) -> None:
    """A Hugging Face folder of a published shape. Random weights, or a model that writes known texts."""
    from kog_dist.bench.made_models.command import run

    run(spec, out, chain or [], seed)
