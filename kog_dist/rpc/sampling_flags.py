"""The flags of the sampling parameters, the same for `kog-client generate` and `kog-launch --prompt`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kog_dist.sampling_params import DEFAULTS, HELP

JSON_SCHEMA = typer.Option(metavar="TEXT|@FILE", help="The answer is JSON that satisfies this schema.")
REGEX = typer.Option(help="The answer, as a whole, matches this regular expression.")
PLACE = "sampling"  # the parameter of a command that stands for all flags; it gets a mapping of them, None where not given


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one flag for each sampling parameter in the place of its parameter `sampling`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        flags = {name: values.pop(name) for name in DEFAULTS}
        command(**values, **{PLACE: flags})

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters += [_flag(name) for name in DEFAULTS] if parameter.name == PLACE else [parameter]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads both
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flag(name: str) -> inspect.Parameter:
    if name == "logit_bias":
        annotation: Any = Annotated[list[str] | None, typer.Option(metavar="ID=BIAS", help=HELP[name])]
    else:
        kind = float if isinstance(DEFAULTS[name], float) else int
        annotation = Annotated[kind | None, typer.Option(help=HELP[name])]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)
