"""`run`: train, in one go or in pieces, in one process or under torchrun."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kog_dist.train.commands.options import CallSecondsOption, DataOption, StateOption

if TYPE_CHECKING:
    from kog_dist.train.config import RunConfig


def run(
    data: DataOption,
    state: StateOption,
    config: Annotated[
        Path | None, typer.Option(help="TOML file such as configs/train/nano.toml; other options change it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Shape: demo (default) or nano.")] = None,
    start: Annotated[Path | None, typer.Option(help="Model folder whose shape and weights the run begins with.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in all; default: what fits into --train-seconds.")] = None,
    train_seconds: Annotated[float | None, typer.Option(help="[default: 1200]")] = None,
    call_seconds: CallSecondsOption = math.inf,
    batch: Annotated[int | None, typer.Option(help="Rows per step, over all GPUs. [default: 128]")] = None,
    time: Annotated[int | None, typer.Option(help="Tokens per row. [default: 2048]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="muon (matrices; AdamW for the rest, default) or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="Of the matrices in layers. [default: 0.005]")] = None,
    adam_lr: Annotated[float | None, typer.Option(help="Of all other weights. [default: 0.003]")] = None,
    schedule: Annotated[str | None, typer.Option(help="wsd: flat, then linear to zero (default); or cosine.")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="[default: 100]")] = None,
    decay_share: Annotated[float | None, typer.Option(help="Last part of a wsd run. [default: 0.4]")] = None,
    function_share: Annotated[float | None, typer.Option(help="Of the decay's rows: single functions. [default: 0]")] = None,
    repetition_share: Annotated[float | None, typer.Option(help="Of the decay's rows: loops to unlearn. [default: 0]")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, float32 or auto: bf16 on CUDA (default).")] = None,
    seed: int | None = None,
    device: str = "cpu",
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="Use torch.compile, layer by layer.")] = None,
    windows: Annotated[str | None, typer.Option(help="Windowed layers: sdpa (default), flex (CUDA), auto: the faster.")] = None,
    deterministic: Annotated[bool | None, typer.Option(help="On CUDA, only kernels that repeat bits (default).")] = None,
    report_every: int = 200,
) -> dict[str, Any] | None:
    """Train, or continue the run that is saved in the state folder. `torchrun -m kog_dist.train run` uses several GPUs."""
    from kog_dist.train.curves import write_curves
    from kog_dist.train.display import RunDisplay
    from kog_dist.train.distributed import join_ranks
    from kog_dist.train.run import Run
    from kog_dist.train.start import start_weights
    from kog_dist.train.state import make_folder
    from kog_dist.train.stopping import StopRequest

    chosen = _chosen(config, model)
    settings = _changed(
        chosen.settings, num_steps=steps, train_seconds=train_seconds, batch=batch, time=time, optimizer=optimizer,
        learning_rate=lr, adam_learning_rate=adam_lr, schedule=schedule, warmup_steps=warmup_steps, decay_share=decay_share,
        function_share=function_share, repetition_share=repetition_share, precision=precision, seed=seed,
    )  # fmt: skip
    execution = _changed(chosen.execution, compiled=compiled, windows=windows, deterministic=deterministic)
    spec, weights = (chosen.spec, None) if start is None else start_weights(start)
    ranks = join_ranks(device)
    make_folder(state)
    training = Run(spec, settings, data, ranks=ranks, execution=execution, start=weights)
    resumed = training.resume(state)
    with RunDisplay(silent=not ranks.is_first) as display, StopRequest() as stop:
        begun = f"resuming at step {training.step_idx}" if resumed else "new run"
        display.line(f"{begun}: {len(training.tokens.train):,} tokens; processes: {ranks.world_size}")
        finished = training.train(
            call_seconds=call_seconds,
            report=display.line,
            report_every=report_every,
            advanced=display.advanced,
            stop=stop.is_asked,
            save_to=state,
        )
    progress = training.progress()
    if ranks.is_first:
        write_curves(state, progress, data)
    del training
    ranks.close()
    if not ranks.is_first:
        return None
    return {
        "finished": finished,
        **{key: progress[key] for key in ("step", "num_steps", "trained_tokens", "trained_seconds")},
        "loss": progress["losses"][-1:],
        "held_out_loss": progress["held_out_losses"][-1:],
    }


def _chosen(config: Path | None, model: str | None) -> RunConfig:
    from kog_dist.train.config import RunConfig, read_run_config
    from kog_dist.train.settings import Execution, RunSettings
    from kog_dist.train.specs import named_spec

    if config is None:
        return RunConfig(named_spec(model or "demo"), RunSettings(), Execution())
    chosen = read_run_config(config)
    return chosen if model is None else replace(chosen, spec=named_spec(model))


def _changed(settings: Any, **given: object) -> Any:
    return replace(settings, **{key: value for key, value in given.items() if value is not None})
