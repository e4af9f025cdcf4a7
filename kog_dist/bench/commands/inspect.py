"""`kog-bench inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from kog_dist.errors import ConfigError


def inspect(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint; none: the bundled demo model.")
    ] = None,
    layers: Annotated[str, typer.Option(help="Layers to look at: 0,3,5; each builds a kernel. Default: the last one.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to decode before looking.")] = 20,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of the KV cache: float16 or bfloat16. Default: the weights'.")
    ] = None,
) -> None:
    """Each phase of a layer on one GPU beside the interpreter's. Names the first one that is wrong, and ends with code 1."""
    from kog_dist.bench.kernel import inspect as benchmark
    from kog_dist.config import LaunchConfig
    from kog_dist.launch.target import model_folder

    if tokens < 1:
        raise ConfigError("--tokens must be at least 1")
    if kv_dtype not in (None, *benchmark.LIMITS):
        raise ConfigError(f"--kv-dtype must be {' or '.join(benchmark.LIMITS)}, got {kv_dtype!r}")
    try:
        chosen = tuple(int(part) for part in layers.split(",") if part)
    except ValueError:
        raise ConfigError(f"--layers must be numbers separated by commas, got {layers!r}") from None
    if not benchmark.run(model_folder(LaunchConfig(model=model))[0], chosen, tokens, kv_dtype):
        raise typer.Exit(1)
