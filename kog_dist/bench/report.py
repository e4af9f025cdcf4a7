"""What every benchmark says about where its figures come from."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, their load when it began, kernel, Python."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Commit of the source tree with `+changes` when it differs from it; the version when there is no repository."""
    from kog_dist import __version__

    folder = Path(__file__).resolve().parent
    try:
        show = ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(show, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return __version__
    return done.stdout.strip() or __version__


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile of values that need not be sorted."""
    ascending = sorted(values)
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]


def finish(benchmark: str, configuration: dict[str, Any], before: dict[str, Any], figures: Any) -> None:
    """Print the JSON object that ends a benchmark; `before` is `machine()` from its start."""
    whole = {"benchmark": benchmark, "commit": commit(), "machine": before, "configuration": configuration, "figures": figures}
    print(json.dumps(whole), flush=True)


@contextmanager
def finishing(benchmark: str, configuration: dict[str, Any], before: dict[str, Any], figures: Any) -> Iterator[None]:
    """`finish` at the end of the block, however it ends: what was measured before an error or an interrupt is printed."""
    try:
        yield
    finally:
        finish(benchmark, configuration, before, figures)


def drawn(draw: Callable[[], None]) -> None:
    """Draw a picture if it can be drawn: what was measured must not be lost with a picture of it."""
    try:
        draw()
    except ImportError:
        print("no picture: matplotlib is not installed (pip install 'kog-dist[bench]')")
    except Exception as error:
        print(f"no picture: {type(error).__name__}: {error}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
