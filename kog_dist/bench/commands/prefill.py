"""`kog-bench prefill`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.bench.options import counts_of
from kog_dist.errors import ConfigError


def prefill(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: --spec.")] = None,
    spec: Annotated[str, typer.Option(help="Shape with random weights, if no MODEL is given: 2b, llama-3.1-8b+fp8, ...")] = "2b",
    prompts: Annotated[str, typer.Option(help="Prompt lengths.")] = "128,512,2048,4000",
    repeats: Annotated[int, typer.Option(help="Prompts of each length; the median counts.")] = 10,
    choices: Annotated[
        str, typer.Option(help="Tunings separated by semicolons: default; no pairs; or all. A wrong one lists them.")
    ] = "default",
    load: Annotated[bool, typer.Option("--load", help="Measure loading with and without the matrices of prefill, too.")] = False,
    only_prompts: Annotated[bool, typer.Option("--only-prompts", help="Leave out the single operations.")] = False,
    stops: Annotated[int, typer.Option(help="Stop the longest prompt at so many times, too, spread over it.")] = 0,
    gpus: Annotated[str, typer.Option(help="Prompts on so many GPUs instead: 2,4, a process each, random weights.")] = "1",
) -> None:
    """Milliseconds to a first token on one GPU. And microseconds of each operation of prefill."""
    from kog_dist.bench.kernel import prefill as benchmark
    from kog_dist.bench.kernel import prefill_ranks

    present = benchmark.CHOICES if gpus == "1" else prefill_ranks.CHOICES
    names = tuple(present) if choices == "all" else tuple(part.strip() for part in choices.split(";"))
    if not set(names) <= set(present):
        raise ConfigError(f"--choices must be all or one or more of {'; '.join(present)}, got {choices!r}")
    if repeats < 1:
        raise ConfigError("--repeats must be at least 1")
    if stops < 0:
        raise ConfigError("--stops must be 0 or more")
    if gpus != "1":
        if stops:
            raise ConfigError("--stops is measured on one GPU: leave out --gpus")
        benchmark.run_on_several(spec, counts_of(gpus, "--gpus"), counts_of(prompts, "--prompts"), repeats, names)
        return
    benchmark.run(
        model,
        spec,
        counts_of(prompts, "--prompts"),
        repeats,
        names,
        with_load=load,
        only_prompts=only_prompts,
        num_stops=stops,
    )
