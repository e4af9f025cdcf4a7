"""Flags of a command that follow from the fields of a dataclass of settings, and those that several commands share.

A field says in its metadata what its flag is: `help`, one sentence or two; `metavar`, if it has a word for its value;
`is_positional`, if it is an argument instead of a flag. The type of its value and its default come from the field itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kog_dist import __version__
from kog_dist.records import dataclass

JSON_SCHEMA = typer.Option(metavar="TEXT|@FILE", help="The answer is JSON that satisfies this schema.")
REGEX = typer.Option(help="The answer, as a whole, matches this regular expression.")
Instance = Annotated[str | None, typer.Option(help="Name of an engine of this user. Default: default.")]
KeyFile = Annotated[Path | None, typer.Option(help="Instead: rpc-access.json of an engine with a TCP port.")]
Command = Callable[..., None]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kog_dist {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")]


@dataclass(frozen=True, slots=True)
class FlagsOf:
    """The flags of a dataclass: of all its fields, or of those in `only`; their help names the default if it `shows_defaults`."""

    settings: type
    only: tuple[str, ...] = ()
    shows_defaults: bool = False

    def parameters(self) -> list[inspect.Parameter]:
        """One parameter of a command for each field, in the order of the fields."""
        hints, kind = get_type_hints(self.settings), inspect.Parameter.POSITIONAL_OR_KEYWORD
        return [
            inspect.Parameter(item.name, kind, default=None, annotation=self._annotation(item, hints[item.name]))
            for item in fields(self.settings)
            if not self.only or item.name in self.only
        ]

    def _annotation(self, item: Field[Any], hint: object) -> object:
        """What typer reads. A tuple is a flag that may be given several times."""
        kinds = {hint if get_origin(hint) is None else get_origin(hint), *get_args(hint)}
        kind: Any = next(kind for kind in (tuple, bool, int, float, str) if kind in kinds)
        help_text = item.metadata["help"] + (f" Default: {_shown(item.default)}." if self._names_default(item) else "")
        metavar = item.metadata.get("metavar")
        if item.metadata.get("is_positional"):
            return Annotated[kind | None, typer.Argument(metavar=metavar or item.name.upper(), help=help_text)]
        if kind is tuple:
            return Annotated[list[str] | None, typer.Option(metavar=metavar, help=help_text)]
        flag = item.name.replace("_", "-")
        names = (f"--{flag}/--no-{flag}",) if kind is bool else ()
        return Annotated[kind | None, typer.Option(*names, metavar=metavar, help=help_text)]

    def _names_default(self, item: Field[object]) -> bool:
        return self.shows_defaults and item.default is not None


def with_flags(**places: FlagsOf) -> Callable[[Command], Command]:
    """Replace each parameter of a command that is named here by flags; it gets a mapping of them, None where not given."""

    def decorated(command: Command) -> Command:
        flags = {place: flags_of.parameters() for place, flags_of in places.items()}

        @functools.wraps(command)
        def run(**values: Any) -> None:
            given = {place: {one.name: values.pop(one.name) for one in made} for place, made in flags.items()}
            command(**values, **given)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            parameters += flags.get(parameter.name, [parameter])
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorated


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)
