"""`run`: train, in one go or in pieces."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from kog_dist.train.commands.options import DataOption, StateOption


def run(
    data: DataOption,
    state: StateOption,
    model: Annotated[str, typer.Option(help="Shape: demo or nano.")] = "demo",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all; default: what fits into --train-seconds.")] = None,
    train_seconds: float = 1200.0,
    call_seconds: Annotated[float, typer.Option(help="Stop and save after this long; the next call resumes.")] = math.inf,
    batch: int = 128,
    time: int = 2048,
    lr: float = 5e-3,
    adam_lr: float = 3e-3,
    warmup_steps: int = 100,
    decay_share: float = 0.4,
    seed: int = 0,
    device: str = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    flex: Annotated[bool, typer.Option("--flex", help="Windowed layers with flex attention (CUDA, with --compile).")] = False,
    report_every: int = 200,
) -> dict[str, Any]:
    """Train, or continue the run that is saved in the state folder."""
    from kog_dist.train.run import Run, RunSettings
    from kog_dist.train.specs import named_spec

    settings = RunSettings(
        num_steps=steps, train_seconds=train_seconds, batch=batch, time=time, learning_rate=lr, adam_learning_rate=adam_lr,
        warmup_steps=warmup_steps, decay_share=decay_share, seed=seed,
    )  # fmt: skip
    training = Run(named_spec(model), settings, data, device=device, compiled=compiled, flex=flex)
    resumed = training.resume(state)
    typer.echo(f"{'resuming at step ' + str(training.step_idx) if resumed else 'new run'}: {len(training.tokens):,} tokens")
    finished = training.train(call_seconds=call_seconds, report=typer.echo, report_every=report_every)
    training.save(state)
    progress = training.progress()
    return {"finished": finished, **{key: progress[key] for key in ("step", "num_steps", "trained_tokens", "trained_seconds")},
            "loss": progress["losses"][-1:], "held_out_loss": progress["held_out_losses"][-1:]}  # fmt: skip
