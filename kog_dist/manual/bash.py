"""What bash completes for a program: commands, flags, words that a setting may be, names of engines; elsewhere files.

The script has all words in it, so that Tab starts no Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from kog_dist.manual.programs import Command, Flag
from kog_dist.runtime.instance import NAME_PATTERN

# Nothing here is expanded twice: names of folders may be commands that somebody else would like to have run.
_INSTANCES = f"""\
    *:--instance)
        local folder=${{XDG_RUNTIME_DIR:+$XDG_RUNTIME_DIR/kog}} lease
        folder=${{folder:-${{TMPDIR:-/tmp}}/kog-$UID}}
        # in a folder that is not ours and closed, others make the names
        if [[ $(command stat -c '%A %u' -- "$folder" 2>/dev/null) == drwx--[-S]---" $UID" ]]; then
            for lease in "$folder"/*/lease; do
                word=${{lease%/lease}} word=${{word##*/}}
                if [[ -e $lease && $word =~ ^{NAME_PATTERN}$ ]]; then words+=("$word"); fi
            done
        fi ;;"""
_HEAD = """\
{function}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} word command=
    local -a words=()
    if [[ $current == = ]]; then  # bash takes the sign for a word of its own
        current=
    elif [[ $previous == = ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
"""
_TAIL = """\
    COMPREPLY=()
    for word in "${{words[@]}}"; do
        if [[ $word == "$current"* ]]; then COMPREPLY+=("$word"); fi
    done
}}
complete -o default -F {function} {program}
"""


def bash_completion(program: Command) -> str:
    """The script, which bash-completion loads when somebody completes the program."""
    function = f"_{program.name.replace('-', '_')}"
    head, tail = _HEAD.format(function=function), _TAIL.format(function=function, program=program.name)
    return "\n".join([head.rstrip(), *_body(program), tail])


def _body(program: Command) -> Iterator[str]:
    names = [command.word for command in program.commands]
    if names:
        yield '    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do'
        yield f"        case $word in {'|'.join(names)}) command=$word; break ;; esac"
        yield "    done"
    yield from ("    case $command:$previous in", _INSTANCES)
    for command in (program, *program.commands):
        yield from _values(command)
    yield "    *)"
    yield "        case $command:$current in"
    for command in program.commands:
        yield f"        {command.word}:-*) words=({_flag_words(command.flags)}) ;;"
    yield f"        :-*) words=({_flag_words(program.flags)}) ;;"
    if names:
        yield f"        :*) words=({_quoted(names)}) ;;"
    yield from ("        esac ;;", "    esac")


def _values(command: Command) -> Iterator[str]:
    """What stands behind flags that take a value."""
    own = command.word
    plain = [name for flag in command.flags if flag.value and not flag.choices for name in flag.names if name != "--instance"]
    for flag in command.flags:
        if flag.choices:
            yield f"    {own}:{flag.names[0]}) words=({_quoted(flag.choices)}) ;;"
    if plain:
        yield f"    {'|'.join(f'{own}:{name}' for name in plain)}) ;;"


def _flag_words(flags: Iterable[Flag]) -> str:
    return _quoted((*(name for flag in flags if not flag.is_argument for name in flag.names), "--help"))


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(shlex.quote, words))
