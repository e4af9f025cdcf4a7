"""What fish completes for a program: a `complete` command for each of its commands and flags, with what it means."""

from __future__ import annotations

from collections.abc import Iterator

from kog_dist.manual.programs import Command, Flag
from kog_dist.runtime.instance import NAME_PATTERN

_INSTANCES = """\
function {function}_instances
    set -l folder (test -n "$TMPDIR"; and echo $TMPDIR; or echo /tmp)/kog-(id -u)
    test -n "$XDG_RUNTIME_DIR"; and set folder $XDG_RUNTIME_DIR/kog
    # in a folder that is not ours and closed, others make the names
    string match -qr '^drwx--[-S]--- '(id -u)'$' (command stat -c '%A %u' -- $folder 2>/dev/null); or return
    for lease in $folder/*/lease
        string match -r '\\A{pattern}\\z' (string split / $lease)[-2]
    end
end
"""
_AT_COMMAND = "__fish_use_subcommand"


def fish_completion(program: Command) -> str:
    """The file, which fish takes for `program` where it lies as `program.fish` in a folder of its `fish_complete_path`."""
    function = f"__{program.name.replace('-', '_')}"
    return _INSTANCES.format(function=function, pattern=NAME_PATTERN) + "\n".join(_lines(program, function)) + "\n"


def _lines(program: Command, function: str) -> Iterator[str]:
    begin = f"complete -c {program.name}"
    own = f"{begin} -n {_AT_COMMAND}" if program.commands else begin
    for command in program.commands:
        yield f"{own} -f -a {command.word} -d {_quoted(command.summary)}"
    yield from _flags(program, own, function)
    for command in program.commands:
        yield from _flags(command, f"{begin} -n {_quoted(f'__fish_seen_subcommand_from {command.word}')}", function)


def _flags(command: Command, begin: str, function: str) -> Iterator[str]:
    for flag in command.flags:
        if not flag.is_argument:
            yield f"{begin} {_names(flag)}{_value(flag, function)} -d {_quoted(flag.summary)}"
    yield f"{begin} -l help -d 'Show what there is'"


def _names(flag: Flag) -> str:
    return " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)


def _value(flag: Flag, function: str) -> str:
    """What stands behind it: files, unless something else is known."""
    if not flag.value:
        return ""
    words = f"({function}_instances)" if flag.names[0] == "--instance" else " ".join(flag.choices)
    return f" -x -a {_quoted(words)}" if words else " -r"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "'\\''") + "'"
