"""`kog-bench load`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def load(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape to write a checkpoint of, with random weights; gpt-oss as published.")] = "2b",
    folder: Annotated[
        str | None, typer.Option(help="Where that checkpoint is put meanwhile. Default: memory, if it fits.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Loads of each kind; the median counts.")] = 3,
) -> None:
    """Seconds to load a checkpoint and pack it on one GPU. From the page cache."""
    from kog_dist.bench.kernel import load as benchmark

    if repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    benchmark.run(model, spec, folder, repeats)
