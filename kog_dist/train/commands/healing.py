"""`healing`: what it costs to give a trained model of delay 0 a delay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from kog_dist.train.commands.options import CallSecondsOption, DataOption, ResultsOption


def healing(
    data: DataOption,
    out: ResultsOption,
    config: Annotated[Path, typer.Option(help="TOML file with [model], [run], [execution] and [heal].")] = Path(
        "configs/train/healing.toml"
    ),
    call_seconds: CallSecondsOption = math.inf,
    device: str = "cuda",
) -> dict[str, object]:
    """Train a model of delay 0, give it a delay with and without regrouping, and train on: losses before and after."""
    from kog_dist.train.distributed import one_device
    from kog_dist.train.healing import Healing, means, read_healing_config, write_report
    from kog_dist.train.stopping import StopRequest

    experiment = Healing(read_healing_config(config), data, out, one_device(device))
    with StopRequest() as stop:
        finished = experiment.train(call_seconds=call_seconds, report=typer.echo, stop=stop.is_asked)
    results = experiment.results()
    write_report(out, experiment.described, results)
    return {
        "finished": finished,
        "table": str(out / "table.md"),
        "losses": {start: after.value for start, (_, after, _) in means(results).items()},
    }
