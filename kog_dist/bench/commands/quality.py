"""`kog-bench quality`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kog_dist.bench.files import writing
from kog_dist.bench.options import Output
from kog_dist.errors import ConfigError


def quality(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder or GGUF file with unquantised weights.")],
    text: Annotated[Path, typer.Option(help="A file whose perplexity is measured.")],
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 2048,
    answer_tokens: Annotated[int, typer.Option(help="Of each of 20 answers.")] = 48,
    forms: Annotated[str, typer.Option(help="Formats besides 16 bit: fp8-block,int4-128+head8; all: every one.")] = "all",
    kv: Annotated[bool, typer.Option("--kv", help="Formats of the KV cache instead, with the weights as they are.")] = False,
    needle: Annotated[bool, typer.Option("--needle", help="Of them: numbers found in a text of --tokens tokens.")] = False,
    output: Output = None,
) -> None:
    """What quantised weights cost, or formats of the KV cache. Perplexity of a text, and answers like those of 16 bit."""
    from kog_dist.bench import kv_quality
    from kog_dist.bench import needle as needles
    from kog_dist.bench import quality as benchmark

    known = benchmark.CHOICES
    chosen = known if forms == "all" else tuple(part for part in forms.split(",") if part)
    if not set(chosen) <= set(known):
        raise ConfigError(f"--forms must be all or some of {', '.join(known)}, got {forms!r}")
    if tokens < 2 or answer_tokens < 1:
        raise ConfigError("--tokens must be at least 2, --answer-tokens at least 1")
    if not text.is_file():
        raise ConfigError(f"--text {text} is no file")
    if kv and needle:
        raise ConfigError("--kv and --needle exclude each other; run them one after the other")
    with writing(output):
        if kv:
            kv_quality.run(model, text, num_tokens=tokens)
        elif needle:
            needles.run(model, text, num_tokens=tokens)
        else:
            benchmark.run(model, text, num_tokens=tokens, answer_tokens=answer_tokens, forms=chosen)
