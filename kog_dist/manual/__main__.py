"""`python -m kog_dist.manual FOLDER`: man pages and completion, where their readers look for them below a share folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from kog_dist.manual.bash import bash_completion
from kog_dist.manual.fish import fish_completion
from kog_dist.manual.man_page import man_page
from kog_dist.manual.programs import Command, programs
from kog_dist.manual.zsh import zsh_completion

_DESCRIPTION = """\
Write man pages and completion for bash, zsh and fish of all kog commands into FOLDER: /usr/local/share for everybody,
~/.local/share for yourself. A new shell finds them there."""
# Of each kind: what it is called, where it lies, the name of a program's file, and what makes it.
_KINDS: Final[tuple[tuple[str, str, str, Callable[[Command], str]], ...]] = (
    ("man pages", "man/man1", "{}.1", man_page),
    ("completion of bash", "bash-completion/completions", "{}", bash_completion),
    ("completion of zsh", "zsh/site-functions", "_{}", zsh_completion),
    ("completion of fish", "fish/vendor_completions.d", "{}.fish", fish_completion),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and say where they are; returns the exit code."""
    parser = argparse.ArgumentParser("python -m kog_dist.manual", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="A share folder; what is missing of it is made.")
    folder: Path = parser.parse_args(arguments).folder
    try:
        for _, below, file_name, text_of in _KINDS:
            (folder / below).mkdir(parents=True, exist_ok=True)
            for program in programs():
                (folder / below / file_name.format(program.name)).write_text(text_of(program), encoding="utf-8")
    except OSError as error:
        print(f"kog_dist.manual: {folder} cannot be written: {error.strerror}; choose another folder", file=sys.stderr)
        return 3
    for what, below, *_ in _KINDS:
        print(f"{what}: {folder / below}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
