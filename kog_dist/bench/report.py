"""What every benchmark says about where its figures come from."""

from __future__ import annotations

import math
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kog_dist.errors import ConfigError, install
from kog_dist.quoting import json_text

DIRTY: Final = "+changes"
RESULTS: Final = Path(__file__).resolve().parents[2] / "docs" / "results"
_FOLDER: Final = Path(__file__).resolve().parent


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
    """Commit of the source tree with `+changes` when it differs from it; the version when there is no repository.

    Files in docs/results are no difference: the shell has emptied the one that a benchmark prints into.
    """
    from kog_dist import __version__

    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return __version__
    return head + (
        DIRTY if _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results") else ""
    )


def check_destination(*paths: Path | str | None) -> None:
    """Refuse to put figures of a tree that is in no commit where results are kept. Raises ConfigError before a measurement."""
    for path in paths:
        if path is None or RESULTS not in [whole := Path(path).resolve(), *whole.parents]:
            continue
        if not _Dirty.is_allowed and commit().endswith(DIRTY):
            raise ConfigError(
                f"{path} would get figures of a tree with changes that are in no commit; commit them, or give kog-bench --dirty"
            )


def check_stdout() -> None:
    """The same for standard output, where the shell has led it to a file."""
    if stat.S_ISREG(os.fstat(1).st_mode):
        check_destination(os.readlink("/proc/self/fd/1"))


def allow_dirty(is_allowed: bool) -> None:
    """For this process: whether figures of such a tree may go to docs/results all the same."""
    _Dirty.is_allowed = is_allowed


class _Dirty:
    is_allowed = False


def _git(*arguments: str) -> str:
    """What git prints about the tree of this package; nothing where there is none."""
    try:
        words = ["git", "-C", str(_FOLDER), *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def percentile(values: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile of values that need not be sorted."""
    ascending = sorted(values)
    return ascending[max(0, math.ceil(fraction * len(ascending)) - 1)]


def finish(benchmark: str, configuration: dict[str, Any], before: dict[str, Any], figures: Any) -> None:
    """Print the JSON object that ends a benchmark (see `print_json`); `before` is `machine()` from its start."""
    source = commit()
    if source.endswith(DIRTY):
        print("these figures are of a tree with changes that are in no commit: not for publication")
    whole = {"benchmark": benchmark, "commit": source, "machine": before, "configuration": configuration, "figures": figures}
    print_json(whole)


def print_json(whole: Mapping[str, object]) -> None:
    """One line for programs. People at a terminal have the table, and this only if they asked for it."""
    _Result.take(whole)
    if _Json.is_wanted or not sys.stdout.isatty():
        print(json_text(whole), flush=True)


def want_json(is_wanted: bool) -> None:
    """For this process: whether a terminal gets the JSON, too."""
    _Json.is_wanted = is_wanted


class _Json:
    is_wanted = False


@contextmanager
def handing_results_to(take: Callable[[Mapping[str, object]], None]) -> Iterator[None]:
    """Within the block the object of each benchmark that finishes also goes to `take`."""
    before, _Result.take = _Result.take, take
    try:
        yield
    finally:
        _Result.take = before


class _Result:
    take: Callable[[Mapping[str, object]], None] = staticmethod(lambda whole: None)


@contextmanager
def finishing(benchmark: str, configuration: dict[str, object], before: dict[str, object], figures: Any) -> Iterator[None]:
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
        print(f"no picture: matplotlib is not installed ({install('bench')})")
    except Exception as error:
        print(f"no picture: {type(error).__name__}: {error}")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
