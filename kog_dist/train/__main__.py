"""`python -m kog_dist.train`: prepare, run, evaluate, export. Each prints one JSON object as its last line."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kog_dist.errors import KogError

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
DataOption = Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")]
StateOption = Annotated[Path, typer.Option(help="Folder of the training state.")]


def _finish(outcome: dict[str, Any]) -> None:
    typer.echo(json.dumps(outcome))


@app.command()
def prepare(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    folder: Annotated[list[Path] | None, typer.Option(help="Take source from this folder instead of installed packages.")] = None,
    licence: Annotated[str, typer.Option(help="SPDX licence of the --folder sources.")] = "",
    held_out: Annotated[list[str] | None, typer.Option(help="Project to keep from training.")] = None,
    vocab_size: int = 4096,
    max_project_bytes: int = 24_000_000,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that clean files; 0 = one per core.")] = 0,
    seed: int = 0,
) -> None:
    """Collect Python source under permissive licences and turn it into tokens."""
    from kog_dist.train.corpus import folder_project, installed_projects
    from kog_dist.train.prepare import prepare as prepare_data

    projects, refused = ([folder_project(path, licence) for path in folder], []) if folder else installed_projects()
    typer.echo(f"{len(projects)} projects; refused for their licence: {', '.join(refused) or 'none'}")
    counts = prepare_data(
        projects, refused, out, held_out=held_out or (), vocab_size=vocab_size, seed=seed, max_project_bytes=max_project_bytes,
        num_processes=processes or os.cpu_count() or 1, tokenizer_file=tokenizer,
    )  # fmt: skip
    _finish(counts)


@app.command()
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
) -> None:
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
    _finish({"finished": finished, **{key: progress[key] for key in ("step", "num_steps", "trained_tokens", "trained_seconds")},
             "loss": progress["losses"][-1:], "held_out_loss": progress["held_out_losses"][-1:]})  # fmt: skip


@app.command()
def evaluate(
    functions: Annotated[Path, typer.Option(help="held_out_functions.json of `prepare`.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json.")],
    model: Annotated[Path | None, typer.Option(help="Model folder to judge.")] = None,
    state: Annotated[Path | None, typer.Option(help="Training state to judge instead, in float32.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all completions to this JSON file.")] = None,
    count: int = 200,
    temperature: float = 0.2,
    max_new_tokens: int = 320,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    """Complete held-out functions and count how many parse."""
    from tokenizers import Tokenizer

    from kog_dist.train.completions import complete_functions, load_module, summary
    from kog_dist.train.prepare import HeldOutFunction

    chosen = [HeldOutFunction(**entry) for entry in json.loads(functions.read_text(encoding="utf-8"))[:count]]
    completions = complete_functions(
        load_module(model, state).to(device), Tokenizer.from_file(str(tokenizer)), chosen,
        temperature=temperature, seed=seed, max_new_tokens=max_new_tokens,
    )  # fmt: skip
    outcome = {**summary(completions), "temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    if out is not None:
        out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    del outcome["completions"]
    _finish(outcome)


@app.command()
def export(
    state: StateOption,
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json of `prepare`.")],
    sources: Annotated[Path, typer.Option(help="sources.json of `prepare`.")],
    out: Annotated[Path, typer.Option(help="Model folder to write.")],
    evaluation: Annotated[Path | None, typer.Option(help="JSON file of `evaluate` for the model card.")] = None,
) -> None:
    """Write the model folder: weights in bfloat16, tokenizer, model card, manifest."""
    from kog_dist.train.export import export as export_model

    export_model(state, tokenizer, sources, out, evaluation_file=evaluation)
    _finish({"model": str(out), "bytes": sum(file.stat().st_size for file in out.iterdir() if file.is_file())})


def main() -> None:
    """Run the command line; a KogError becomes one line on stderr and its exit code."""
    try:
        app()
    except KogError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
