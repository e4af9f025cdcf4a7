"""`prepare`: source code to tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def prepare(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    folder: Annotated[list[Path] | None, typer.Option(help="Take source from this folder instead of installed packages.")] = None,
    site_packages: Annotated[
        list[Path] | None, typer.Option(help="Also take the packages in this folder (pip install --no-deps --target FOLDER).")
    ] = None,
    licence: Annotated[str, typer.Option(help="SPDX licence of the --folder sources; default: by their licence files.")] = "",
    held_out: Annotated[list[str] | None, typer.Option(help="Project to keep from training.")] = None,
    vocab_size: int = 4096,
    max_project_bytes: int = 24_000_000,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json instead of training one.")] = None,
    processes: Annotated[int, typer.Option(help="Processes that clean files; 0 = one per core.")] = 0,
    seed: int = 0,
    fim_rate: Annotated[float, typer.Option(help="Share of the training text that is rearranged for fill-in-the-middle.")] = 0.0,
    functions: Annotated[bool, typer.Option("--functions", help="Also write single functions: run --function-share.")] = False,
) -> dict[str, object]:
    """Collect Python source under permissive licences and turn it into tokens."""
    from kog_dist.train.corpus import folder_project, installed_projects
    from kog_dist.train.prepare import prepare as prepare_data

    if folder:
        projects, refused = [folder_project(path, licence) for path in folder], dict[str, str]()
    else:
        projects, refused = installed_projects(site_packages or ())
    typer.echo(f"{len(projects)} projects; refused for their licence: {', '.join(refused) or 'none'}")
    return prepare_data(
        projects, refused, out, held_out=held_out or (), vocab_size=vocab_size, seed=seed, max_project_bytes=max_project_bytes,
        num_processes=processes or os.cpu_count() or 1, tokenizer_file=tokenizer, fim_rate=fim_rate,
        with_functions=functions,
    )  # fmt: skip
