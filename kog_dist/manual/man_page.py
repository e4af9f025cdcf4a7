"""One page of section 1 for each program, in the language of man (troff)."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist import __version__, config, env
from kog_dist.manual.programs import Command, Flag


def man_page(program: Command) -> str:
    """The whole page."""
    return "\n".join(_lines(program)) + "\n"


def _lines(program: Command) -> Iterator[str]:
    yield f'.TH {program.name.upper()} 1 "" "kog_dist {__version__}" "kog_dist"'
    yield from (".SH NAME", f"{_text(program.name)} \\- {_text(program.summary)}")
    yield from (".SH SYNOPSIS", *_synopsis(program))
    yield from (".SH DESCRIPTION", _text(program.text))
    if program.flags:
        yield from (".SH OPTIONS", *_flags(program))
    if program.commands:
        yield ".SH COMMANDS"
        for command in program.commands:
            yield from (f".SS {_text(command.word)}", _text(command.text), *_flags(command))
    if program.name == "kog-launch":
        yield from (".SH ENVIRONMENT", *_environment())
    if program.examples:
        yield from (".SH EXAMPLES", *_examples(program))
    yield from (".SH SEE ALSO", "README.md and docs/ of the project")


def _synopsis(program: Command) -> Iterator[str]:
    arguments = " ".join(f"[{_text(flag.names[0])}]" for flag in program.flags if flag.is_argument)
    rest = "COMMAND [OPTIONS]" if program.commands else arguments
    yield f".B {_text(program.name)}\n[OPTIONS] {rest}".rstrip()


def _flags(command: Command) -> Iterator[str]:
    for flag in command.flags:
        yield from (".TP", _name(flag), _text(_meaning(flag)) or "\\&")


def _name(flag: Flag) -> str:
    value = f" \\fI{_text(flag.value)}\\fR" if flag.value else ""
    return ", ".join(f"\\fB{_text(name)}\\fR" for name in flag.names) + value


def _meaning(flag: Flag) -> str:
    return f"{flag.meaning} Default: {flag.default}." if flag.default and "Default:" not in flag.meaning else flag.meaning


def _environment() -> Iterator[str]:
    yield _text(
        "A setting that has no flag on the command line is taken from its variable, and then from the file of --config, where "
        "its key is the name of the flag with underscores. --print-config shows where each value came from."
    )
    yield from (".PP", _text(f"{', '.join(map(env.variable, config.SETTINGS))}"))


def _examples(program: Command) -> Iterator[str]:
    every = (*program.examples, *(example for command in program.commands for example in command.examples))
    for shown, meaning in every:
        yield from (".TP", f"\\fB{_text(shown)}\\fR", _text(meaning) or "\\&")


def _text(text: str) -> str:
    """As it shall be read: no letter of it is an instruction."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped
