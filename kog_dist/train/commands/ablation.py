"""`ablation`: loss against delay, lanes and kinds of communication."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.train.commands.options import CallSecondsOption, DataOption, ResultsOption


def ablation(
    data: DataOption,
    out: ResultsOption,
    config: Annotated[Path, typer.Option(help="TOML file with [model], [run], [execution] and [grid].")] = Path(
        "configs/train/ablation.toml"
    ),
    call_seconds: CallSecondsOption = math.inf,
    lanes: Annotated[list[int] | None, typer.Option(help="Train only these lanes of the grid.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Train only these seeds of the grid.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Trained at the same time, over all GPUs; two on each GPU hide launches.")
    ] = 1,
    first: Annotated[int, typer.Option(hidden=True)] = 0,
    device: str = "cuda",
) -> dict[str, object]:
    """Train all runs of a grid that are not done yet, and write table, pictures and JSON of those that are."""
    from kog_dist.train.ablation import Ablation
    from kog_dist.train.ablation_grid import read_ablation_config
    from kog_dist.train.ablation_report import write_report
    from kog_dist.train.distributed import one_device
    from kog_dist.train.processes import companions
    from kog_dist.train.stopping import StopRequest
    from kog_dist.train.tokens import held_out_bytes_per_token

    settings = read_ablation_config(config)
    jobs = settings.grid.jobs(lanes or (), seed or (), first)
    arguments = ["ablation", f"--data={data}", f"--out={out}", f"--config={config}", f"--device={device}"]
    arguments += [f"--call-seconds={call_seconds}", *(f"--lanes={n}" for n in lanes or ()), *(f"--seed={n}" for n in seed or ())]
    bytes_per_token = held_out_bytes_per_token(data)
    comparison = Ablation(settings, data, out, one_device(device))
    with StopRequest() as stop, companions(arguments, processes - 1, device, stop.is_asked):
        comparison.train(jobs, call_seconds=call_seconds, report=typer.echo, stop=stop.is_asked)
    with comparison.alone():
        results = comparison.results()
        rows = write_report(out, comparison.described, results, bytes_per_token)
    return {
        "finished": comparison.num_done(jobs) == len(jobs),
        "num_runs": len(settings.grid.jobs()),
        "num_done": len(results),
        "table": str(out / "table.md"),
        "differences": {row.label: [row.difference.value, row.difference.half] for row in rows if row.difference is not None},
    }
