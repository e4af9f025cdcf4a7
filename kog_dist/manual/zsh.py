"""What zsh completes for a program: a function of its completion system, each flag with what it means."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.manual.programs import Command, Flag
from kog_dist.runtime.instance import NAME_PATTERN

_HEAD = """\
#compdef {program}

{function}_instances() {{
    local folder=${{XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/kog}} name
    local -a names closed
    folder=${{folder:-${{TMPDIR:-/tmp}}/kog-$UID}}
    closed=("$folder"(N/Uf:go-rwx:))
    (( $#closed )) || return 1  # in a folder that is not ours and closed, others make the names
    for name in "$folder"/*/lease(N:h:t); do
        [[ $name =~ '^{pattern}$' ]] && names+=("$name")
    done
    compadd -a names
}}

{function}() {{
    local curcontext=$curcontext state state_descr line
    typeset -A opt_args
"""
_TAIL = """\
}}

{function} "$@"
"""


def zsh_completion(program: Command) -> str:
    """The file, which zsh takes for `program` where it lies as `_program` in a folder of its `fpath`."""
    function = f"_{program.name.replace('-', '_')}"
    head, tail = _HEAD.format(program=program.name, function=function, pattern=NAME_PATTERN), _TAIL.format(function=function)
    return "\n".join([head.rstrip(), *_body(program, function), tail])


def _body(program: Command, function: str) -> Iterator[str]:
    if not program.commands:
        yield _call(program.flags, function)
        return
    commands = " ".join(f"{one.word}\\:{_double_quoted(one.summary)}" for one in program.commands)
    behind = (f"1:command:(({commands}))", "*::argument:->argument")
    yield f"{_call(program.flags, function, *behind)} && return"
    yield "    case $words[1] in"
    for command in program.commands:
        yield f"    {command.word})\n    {_call(command.flags, function)} ;;"
    yield "    esac"


def _call(flags: tuple[Flag, ...], function: str, *more: str) -> str:
    specs = [spec for flag in flags for spec in _specs(flag, function)]
    words = (*specs, "(- *)--help[Show what there is]", *more)
    return " \\\n        ".join(["    _arguments -C", *map(_quoted, words)])


def _specs(flag: Flag, function: str) -> Iterator[str]:
    """One for each name, of which zsh offers no other once one of them is there."""
    if flag.is_argument:
        yield f":{_escaped(flag.names[0])}:_files"
        return
    if flag.names[0] == "--instance":
        action = f"{function}_instances"
    else:
        action = f"({' '.join(flag.choices)})" if flag.choices else "_files"
    first = "*" if flag.is_repeatable else f"({' '.join(flag.names)})" if len(flag.names) > 1 else ""
    for name in flag.names:
        sign = "" if not flag.value else "=" if name.startswith("--") else "+"
        value = f":{_escaped(flag.value)}:{action}" if flag.value else ""
        yield f"{first}{name}{sign}[{_escaped(flag.summary)}]{value}"


def _escaped(text: str) -> str:
    """As a part of a specification, in which brackets and colons end one."""
    for sign in "\\[]:":
        text = text.replace(sign, f"\\{sign}")
    return text


def _double_quoted(text: str) -> str:
    """As a description within a list of words, which is evaluated once more."""
    for sign in '\\"$`':
        text = text.replace(sign, f"\\{sign}")
    return f'"{text}"'.replace(":", "\\:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
