"""`python -m kog_dist.train`: from source code to a model folder. Each command prints one JSON object as its last line."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable

import typer

from kog_dist.errors import KogError, naming_extra
from kog_dist.rpc.output import checked_stdout
from kog_dist.train.commands.ablation import ablation
from kog_dist.train.commands.convert import convert
from kog_dist.train.commands.evaluate import evaluate
from kog_dist.train.commands.export import export
from kog_dist.train.commands.heal import heal
from kog_dist.train.commands.healing import healing
from kog_dist.train.commands.prepare import prepare
from kog_dist.train.commands.run import run

PROGRAM = "python -m kog_dist.train"
COMMANDS: tuple[Callable[..., dict[str, object] | None], ...] = (
    prepare,
    run,
    ablation,
    evaluate,
    export,
    convert,
    heal,
    healing,
)

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, help=__doc__)


def _printing(command: Callable[..., dict[str, object] | None]) -> Callable[..., None]:
    @functools.wraps(command)
    def call(*args: object, **kwargs: object) -> None:
        outcome = command(*args, **kwargs)
        if outcome is not None:  # torchrun's processes but the first have nothing to say
            typer.echo(json.dumps(outcome))

    return call


for _command in COMMANDS:
    app.command()(_printing(_command))


def main() -> None:
    """Run the command line; a KogError becomes one line on stderr and its exit code."""
    try:
        with checked_stdout(), naming_extra("train"):
            app(prog_name=PROGRAM)
    except KogError as error:
        typer.echo(f"{PROGRAM}: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
