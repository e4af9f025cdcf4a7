"""`kog-bench collectives`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.bench.report import check_destination
from kog_dist.errors import ConfigError


def collectives(
    gpus: Annotated[int, typer.Option(help="GPUs, a rank each. Under mpirun: as many as it has started.")] = 4,
    sizes: Annotated[str, typer.Option(help="Bytes of each all-reduce: 6144,12288.")] = "6144,12288",
    steps: Annotated[int, typer.Option(help="Dependent all-reduces in one launch.")] = 1000,
    repeats: Annotated[int, typer.Option(help="Launches; the median counts.")] = 11,
    libraries: Annotated[bool, typer.Option(help="Measure NCCL and torch symmetric memory, too.")] = True,
    kills: Annotated[int, typer.Option(help="Times that a rank is killed while all others spin.")] = 0,
    out: Annotated[str | None, typer.Option(help="Folder for collectives.json and collectives.png.")] = None,
) -> None:
    """Microseconds of an all-reduce inside a kernel. Beside NCCL and torch. Code 1: a killed rank held the others up."""
    from kog_dist.bench.collectives import run as benchmark

    chosen = counts_of(sizes, "--sizes")
    if not 2 <= gpus <= 8 or any(size % 4096 and size % 6144 for size in chosen) or steps < 1 or repeats < 1 or kills < 0:
        raise ConfigError(
            "--gpus must be from 2 to 8, --sizes multiples of 4096 or 6144, --steps and --repeats at least 1, --kills at least 0"
        )
    check_destination(out)
    if not benchmark.run(gpus, chosen, steps=steps, repeats=repeats, libraries=libraries, kills=kills, folder=out):
        raise typer.Exit(1)
