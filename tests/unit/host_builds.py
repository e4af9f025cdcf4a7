"""The C of CPU ranks, built for instruction sets of the test's choice."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MARCHES: Final = {"x86-64": (), "x86-64-v3": ("avx2", "fma")}


def has_instructions(march: str) -> bool:
    """Whether this processor runs what is built for it."""
    flags = next(line for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if line.startswith("flags"))
    return set(MARCHES[march]) <= set(flags.split())
