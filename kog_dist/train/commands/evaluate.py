"""`evaluate`: completions of held-out functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    functions: Annotated[Path, typer.Option(help="held_out_functions.json of `prepare`.")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json.")],
    model: Annotated[Path | None, typer.Option(help="Model folder to judge.")] = None,
    state: Annotated[Path | None, typer.Option(help="Training state to judge instead, in float32.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all completions to this JSON file.")] = None,
    count: Annotated[int, typer.Option(help="Functions to parse; all others that have unit tests are added for these.")] = 500,
    temperature: float = 0.2,
    max_new_tokens: int = 320,
    seed: int = 0,
    batch: Annotated[int, typer.Option(help="Functions that are completed together; changes time and memory only.")] = 256,
    device: str = "cpu",
) -> dict[str, object]:
    """Complete held-out functions, count how many parse, and how many pass the unit tests of those that have some."""
    import time

    from tokenizers import Tokenizer

    from kog_dist.foreign_file import read_text
    from kog_dist.train.completions import chosen_functions, complete_functions, load_module, summary
    from kog_dist.train.held_out import load_functions

    sample, tested = chosen_functions(load_functions(functions), count)
    module = load_module(model, state).to(device)
    started = time.perf_counter()
    completions = complete_functions(
        module,
        Tokenizer.from_str(read_text(tokenizer)),
        [*sample, *tested],
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
        batch=batch,
    )
    every = summary(completions)
    outcome = {
        **summary(completions[: len(sample)]),
        **{key: every[key] for key in ("num_tested", "num_passed", "pass_share", "completions")},
        "temperature": temperature,
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "device": device,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if out is not None:
        out.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    del outcome["completions"]
    return outcome
