"""g++ for device sources that tests run on a CPU, with a twin's header in the place of CUDA's."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
COMMAND = ("g++", "-std=c++20", "-O1", "-ffp-contract=off", "-mf16c", "-w")
SYSTEM = "system.h"  # beside a source, if there is one: the system's headers that it includes, a quarter of the compiler's time


def build(source: Path, output: str, *flags: str) -> Path:
    """The program or library `output`, beside `source`, which includes what lies there.

    Products are not fused into sums, as in the twins' arithmetic. The CPU's own conversions of 16-bit floats round like those of
    the compiler's library, which take most of the time of models with codes.
    """
    folder = source.parent
    if (folder / SYSTEM).exists():
        compiled = Path(_precompiled((folder / SYSTEM).read_text(), flags).name) / f"{SYSTEM}.gch"
        (folder / compiled.name).unlink(missing_ok=True)
        (folder / compiled.name).symlink_to(compiled)
        flags = ("-include", SYSTEM, *flags)
    _run([*COMMAND, *flags, "-I", ".", "-o", output, source.name], folder)
    return folder / output


@cache
def _precompiled(text: str, flags: tuple[str, ...]) -> tempfile.TemporaryDirectory[str]:
    """A folder, for as long as this process lives, with the compiled header of this text."""
    folder = tempfile.TemporaryDirectory(prefix="system-header-")
    (Path(folder.name) / SYSTEM).write_text(text)
    _run([*COMMAND, *flags, "-x", "c++-header", "-o", f"{SYSTEM}.gch", SYSTEM], Path(folder.name))
    return folder


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
