"""Every command line of this project as data: what it is called, what it does, which flags it takes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.main import get_command

from kog_dist import config
from kog_dist.bench.cli import app as bench
from kog_dist.chat.flags import app as chat
from kog_dist.doctor.cli import parser as doctor_parser
from kog_dist.gateway.cli import app as gateway
from kog_dist.launch.flags import app as launch
from kog_dist.records import dataclass
from kog_dist.rpc.flags import app as client
from kog_dist.rpc.help_examples import EXAMPLES

APPS: Final[Mapping[str, typer.Typer]] = {
    "kog-launch": launch,
    "kog-client": client,
    "kog-chat": chat,
    "kog-gateway": gateway,
    "kog-bench": bench,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One option, or an argument, whose only name is then its metavar."""

    names: tuple[str, ...]
    value: str  # what stands behind it: FILE; empty for a switch, and for an argument
    meaning: str
    default: str = ""
    choices: tuple[str, ...] = ()
    is_repeatable: bool = False

    @property
    def is_argument(self) -> bool:
        """Whether it has no dashes."""
        return not self.names[0].startswith("-")

    @property
    def summary(self) -> str:
        """The first sentence of its meaning, without its stop."""
        return _first_sentence(self.meaning)


@dataclass(frozen=True, slots=True)
class Command:
    """A program, or one of its commands: `kog-client stop`."""

    name: str
    text: str
    flags: tuple[Flag, ...]
    commands: tuple[Command, ...] = ()

    @property
    def summary(self) -> str:
        """The first sentence, without its stop."""
        return _first_sentence(self.text)

    @property
    def word(self) -> str:
        """What stands behind the program's name on a command line: `stop`; empty for the program itself."""
        return self.name.partition(" ")[2]

    @property
    def examples(self) -> tuple[tuple[str, str], ...]:
        """Commands, each with what it is for."""
        return tuple(EXAMPLES.get(self.name, ()))


def programs() -> tuple[Command, ...]:
    """All that an installation puts on the path."""
    return (*(of_typer(name, get_command(app)) for name, app in APPS.items()), _doctor())


def of_typer(name: str, found: Any) -> Command:
    """A command of typer's, with those below it."""
    below = tuple(of_typer(f"{name} {one}", command) for one, command in getattr(found, "commands", {}).items())
    shown = (parameter for parameter in found.params if not getattr(parameter, "hidden", False))
    flags = tuple(_flag(parameter, name) for parameter in shown if parameter.name != "help")
    text = " ".join((found.help or "").split())
    return Command(name, text, flags, below)


def _flag(parameter: Any, command: str) -> Flag:
    names, meaning = (*parameter.opts, *parameter.secondary_opts), getattr(parameter, "help", None) or ""
    is_settings = command == "kog-launch" and parameter.name in config.SETTINGS
    default = "" if is_settings or parameter.default is False else _shown(parameter.default)  # settings name it in their meaning
    if not parameter.opts[0].startswith("-"):
        return Flag((parameter.metavar or parameter.name.upper(),), "", meaning, default)
    value = "" if parameter.is_flag else parameter.metavar or "VALUE"
    choices = config.CHOICES.get(parameter.name, ()) if is_settings else ()
    return Flag(names, value, meaning, default, choices, bool(getattr(parameter, "multiple", False)))


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def _shown(value: object) -> str:
    if value is None or value in ((), [], "") or callable(value):
        return ""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _doctor() -> Command:
    parser = doctor_parser()
    return Command("kog-doctor", " ".join((parser.description or "").split()), tuple(_doctor_flags(parser)))


def _doctor_flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        if action.dest != "help":
            meaning = action.help or ""
            yield Flag(tuple(action.option_strings), "", f"{meaning[:1].upper()}{meaning[1:]}.")
