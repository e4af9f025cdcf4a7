"""`ablation`: loss against delay, lanes and kinds of communication."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kog_dist.train.commands.options import DataOption


def ablation(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the results; what is done there is not done again.")],
    config: Annotated[Path, typer.Option(help="TOML file with [model], [run], [execution] and [grid].")] = Path(
        "configs/train/ablation.toml"
    ),
    call_seconds: Annotated[float, typer.Option(help="Stop after this long; the next call resumes.")] = math.inf,
    lanes: Annotated[list[int] | None, typer.Option(help="Train only these lanes of the grid.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Train only these seeds of the grid.")] = None,
    device: str = "cuda",
) -> dict[str, Any]:
    """Train all runs of a grid that are not done yet, and write table, pictures and JSON of those that are."""
    from kog_dist.train.ablation import Ablation
    from kog_dist.train.ablation_grid import read_ablation_config
    from kog_dist.train.ablation_report import write_report
    from kog_dist.train.distributed import one_device
    from kog_dist.train.stopping import StopRequest
    from kog_dist.train.tokens import held_out_bytes_per_token

    settings = read_ablation_config(config)
    jobs = settings.grid.jobs(lanes or (), seed or ())
    bytes_per_token = held_out_bytes_per_token(data)
    comparison = Ablation(settings, data, out, one_device(device))
    with StopRequest() as stop:
        finished = comparison.train(jobs, call_seconds=call_seconds, report=typer.echo, stop=stop.is_asked)
    results = comparison.results()
    rows = write_report(out, comparison.described, results, bytes_per_token)
    return {
        "finished": finished, "num_runs": len(settings.grid.jobs()), "num_done": len(results), "table": str(out / "table.md"),
        "differences": {row.label: [row.difference.value, row.difference.half] for row in rows if row.difference is not None},
    }  # fmt: skip
