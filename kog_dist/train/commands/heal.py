"""`heal`: a model of delay 0 as the start of a run with delay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def heal(
    model: Annotated[Path, typer.Option(help="Model folder of delay 0, for example one that `convert` wrote.")],
    out: Annotated[Path, typer.Option(help="Model folder to write, for `run --start`.")],
    delay: Annotated[int, typer.Option(help="Layers between a lane's output and its arrival.")] = 2,
    affinity: Annotated[bool, typer.Option("--affinity", help="Regroup heads and FFN columns first; needs --data.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder that `prepare` wrote with the model's tokenizer.")] = None,
    count: Annotated[int, typer.Option(help="Training tokens that the coupling is measured with.")] = 4096,
) -> dict[str, object]:
    """Give a model of delay 0 another delay, to be trained until its weights fit."""

    from kog_dist.errors import ConfigError
    from kog_dist.train.affinity import regrouped_for_delay
    from kog_dist.train.start import healing_start, start_weights, write_start
    from kog_dist.train.tokens import load_shard

    spec, tensors = start_weights(model)
    healed = healing_start(spec, delay)
    shares: dict[str, object] = {}
    if affinity:
        if data is None or not (data / "train-000.npy").exists():
            raise ConfigError("--affinity needs --data, a folder that `prepare` wrote")
        tokens = load_shard(data / "train-000.npy")
        regrouped = regrouped_for_delay(spec, tensors, tokens, delay, count)
        tensors = regrouped.tensors
        shares = {"share_before": round(regrouped.share_before, 5), "share_after": round(regrouped.share_after, 5)}
    write_start(out, healed, tensors)
    return {"out": str(out), "delay": delay, **shares}
