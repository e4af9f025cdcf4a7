"""Options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataOption = Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")]
StateOption = Annotated[Path, typer.Option(help="Folder of the training state.")]
