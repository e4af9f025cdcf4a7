"""`kog-bench compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.files import writing
from kog_dist.bench.options import Output
from kog_dist.errors import ConfigError


def compare(
    first: Annotated[str, typer.Argument(metavar="A.json", help="Written by kog-bench serve --output.")],
    second: Annotated[str, typer.Argument(metavar="B.json", help="Another one.")],
    fail_if_slower: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Code 1 if B is slower by more than that, and not by chance.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    output: Output = None,
) -> None:
    """Two results of serve side by side. Ratios with 95% intervals, and what is not the same in their configurations."""
    from kog_dist.bench import compare as comparison

    if fail_if_slower is not None and not fail_if_slower >= 0:
        raise ConfigError("--fail-if-slower must be a percentage of at least 0")
    with writing(output):
        if not comparison.run(Path(first), Path(second), fail_if_slower=fail_if_slower, seed=seed):
            raise typer.Exit(1)
