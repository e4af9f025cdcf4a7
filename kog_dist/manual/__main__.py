"""`python -m kog_dist.manual FOLDER`: writes man pages and completion of bash where both look for them below a share folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kog_dist.manual.completion import bash_completion
from kog_dist.manual.man_page import man_page
from kog_dist.manual.programs import programs

_DESCRIPTION = """\
Write man pages and bash completion of all kog commands into FOLDER: /usr/local/share for everybody, ~/.local/share for
yourself. A new shell finds them there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and say where they are; returns the exit code."""
    parser = argparse.ArgumentParser("python -m kog_dist.manual", description=_DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="A share folder; what is missing of it is made.")
    folder: Path = parser.parse_args(arguments).folder
    pages, scripts = folder / "man" / "man1", folder / "bash-completion" / "completions"
    try:
        for made in (pages, scripts):
            made.mkdir(parents=True, exist_ok=True)
        for program in programs():
            (pages / f"{program.name}.1").write_text(man_page(program), encoding="utf-8")
            (scripts / program.name).write_text(bash_completion(program), encoding="utf-8")
    except OSError as error:
        print(f"kog_dist.manual: {folder} cannot be written: {error.strerror}; choose another folder", file=sys.stderr)
        return 3
    print(f"man pages are in {pages}, completion of bash in {scripts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
