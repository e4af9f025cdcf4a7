"""`export`: a training state to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.train.commands.options import StateOption


def export(
    state: StateOption,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of `prepare`.")],
    sources: Annotated[Path, typer.Option(help="sources.json of `prepare`.")],
    out: Annotated[Path, typer.Option(help="Model folder to write.")],
    evaluation: Annotated[Path | None, typer.Option(help="JSON file of `evaluate` for the model card.")] = None,
) -> dict[str, object]:
    """Write the model folder: weights in bfloat16, tokenizer, model card, manifest."""
    from kog_dist.train.export import export as export_model

    export_model(state, tokenizer, sources, out, evaluation_file=evaluation)
    return {"model": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir() if file.is_file())}
