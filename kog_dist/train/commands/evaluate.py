"""`evaluate`: completions of held-out functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


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
) -> dict[str, Any]:
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
    return outcome
