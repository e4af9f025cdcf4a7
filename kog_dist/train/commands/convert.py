"""`convert`: a Llama checkpoint to lane form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    llama: Annotated[Path, typer.Option(help="Folder with config.json and *.safetensors of a LlamaForCausalLM.")],
    out: Annotated[Path, typer.Option(help="Model folder to write.")],
    lanes: Annotated[int, typer.Option(help="Power of two that divides KV heads and FFN columns.")] = 8,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
) -> dict[str, object]:
    """Write a Llama in lane form with delay 0: the same function, decoded by as many ranks as divide the lanes."""
    from kog_dist.errors import ConfigError
    from kog_dist.train.llama import convert_llama

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ConfigError(f"--dtype must be bfloat16, float16 or float32, got {dtype!r}")
    spec = convert_llama(llama, out, lanes, dtype=dtype)
    return {"out": str(out), "num_parameters": spec.num_parameters, "num_lanes": spec.num_lanes}
