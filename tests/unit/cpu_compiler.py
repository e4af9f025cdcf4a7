"""g++ for device sources that tests run on a CPU, with a twin's header in the place of CUDA's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(source: Path, output: str, *flags: str) -> Path:
    """The program or library `output`, beside `source`, which includes what lies there.

    Products are not fused into sums, as in the twins' arithmetic. The CPU's own conversions of 16-bit floats round like those of
    the compiler's library, which take most of the time of models with codes.
    """
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-mf16c", "-w", *flags, "-I", ".", "-o", output, source.name]
    done = subprocess.run(command, cwd=source.parent, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return source.parent / output
