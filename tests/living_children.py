"""Children of this process by what they run, without those that were killed and have still to end."""

from __future__ import annotations

import threading

import psutil  # type: ignore[import-untyped]

PATIENCE_S = 30.0


def living_children(*modules: str) -> list[psutil.Process]:
    """Those that run one of these Python modules."""
    for thread in threading.enumerate():
        if thread.name.startswith("end of "):  # killed_child.py
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread.name
    return [child for child in psutil.Process().children() if set(modules) & set(child.cmdline())]
