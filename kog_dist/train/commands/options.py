"""Options that several subcommands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DataOption = Annotated[Path, typer.Option(help="Folder that `prepare` wrote.")]
ResultsOption = Annotated[Path, typer.Option(help="Folder of the results; what is done there is not done again.")]
CallSecondsOption = Annotated[float, typer.Option(help="Stop and save after this long; the next call resumes.")]
StateOption = Annotated[Path, typer.Option(help="Folder of the training state.")]
