"""What may be shown of a command line: it holds keys and prompts, and goes to logs and terminals of others."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, get_type_hints

from kog_dist.config import SECRETS, SETTINGS, LaunchConfig, flag_name
from kog_dist.quoting import escaped

SHOWN_CHARS: Final = 120
_LAUNCHERS: Final = ("kog-launch", "kog_dist.launch.cli")  # whose settings are shown
_HIDDEN: Final = "..."


def own_command() -> str:
    """What may be shown of this process."""
    return shown_command(sys.orig_argv)


def hide_own(flag: str, secret: str | None) -> None:
    """Have the system show the command line of this process, and of those that it forks, without the value of a flag.

    Until then everybody could read it. Nothing happens where the value came from elsewhere.
    """
    if secret is None:
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin_ptr, end_ptr = int(fields[45]), int(fields[46])  # arg_start and arg_end; see proc(5), fields 48 and 49
    shown = (ctypes.c_char * (end_ptr - begin_ptr)).from_address(begin_ptr)
    value = re.escape(os.fsencode(secret))
    for found in re.finditer(rb"(?<=\0)" + re.escape(flag.encode()) + rb"[=\0](" + value + rb")(?=\0)", shown.raw):
        ctypes.memset(begin_ptr + found.start(1), ord("."), len(found[1]))


def command_of(pid: int) -> str:
    """The same of another one, empty where it cannot be read. Nothing else reads command lines to show them."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return shown_command(raw.decode(errors="replace").split("\0")[:-1])


def shown_command(words: Sequence[str]) -> str:
    """The program, and of kog-launch the settings that are no secret: one line, bounded.

    `...` stands for a secret and, at the end, for all from the first word on that is neither the model nor a setting.
    """
    rest = list(words)
    shown = list(_program(rest))
    if shown and shown[-1] in _LAUNCHERS:
        shown += _settings(rest)
    elif rest:
        shown.append(_HIDDEN)
    text = " ".join(" ".join(escaped(word).split()) for word in shown)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - len(_HIDDEN)]}{_HIDDEN}"


def _program(rest: list[str]) -> Iterator[str]:
    """Takes the program from the front of the words; that of an interpreter, too, as `python` and its script or module."""
    if not rest:
        return
    title = rest.pop(0).split()  # some programs write a title over their command line
    program = Path(title[0]).name if title else "?"
    yield program
    if not program.startswith("python"):
        return
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        takes_value = rest[0] in ("-X", "-W")
        del rest[: 1 + takes_value]
    if rest and rest[0] == "-m" and len(rest) > 1:
        del rest[0]
        yield "-m"
        yield rest.pop(0)
    elif rest and not rest[0].startswith("-"):
        yield Path(rest.pop(0)).name


def _settings(words: list[str]) -> Iterator[str]:
    unread, has_model = iter(words), False
    for word in unread:
        name, sign, value = word.partition("=")
        setting = _FLAGS.get(name)
        if setting is None:
            if has_model or name.startswith("-") or word == _HIDDEN:
                yield _HIDDEN
                return
            has_model = True
            yield word
        elif setting in _SWITCHES:
            yield name
        else:
            value = value if sign else next(unread, "")
            yield f"{name}{sign or ' '}{_HIDDEN if setting in SECRETS else value}"


_SWITCHES: Final = {name for name, hint in get_type_hints(LaunchConfig).items() if hint is bool}
_FLAGS: Final = {
    word: name
    for name in SETTINGS
    for word in (flag_name(name), *([f"--no-{name.replace('_', '-')}"] if name in _SWITCHES else []))
    if word.startswith("-")
}
