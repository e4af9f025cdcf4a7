"""`kog-bench collectives`: all-reduces of KCCL inside a kernel, beside NCCL and torch symmetric memory in the same run."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kog_dist.bench.collectives.kccl import chains
from kog_dist.bench.collectives.mpi import in_mpi
from kog_dist.bench.collectives.table import kccl_table, kill_line, library_table, write
from kog_dist.bench.collectives.torch_nccl import ENVIRON, TUNED
from kog_dist.bench.kernel.gpu import require_gpus
from kog_dist.bench.report import finishing, machine
from kog_dist.collectives.ranks import run_ranks
from kog_dist.errors import LaunchError
from kog_dist.runtime.rank_env import read_rank_variables

_KCCL = "kog_dist.bench.collectives.kccl"
_TORCH = "kog_dist.bench.collectives.torch_nccl:measure"
_DEADLINE_S = 150.0
# One process start for each: name in the table, environment, methods.
_LIBRARIES: tuple[tuple[str, Mapping[str, str], tuple[str, ...]], ...] = (
    ("default", {}, ("nccl", "torch one-shot", "torch two-shot")),
    ("tuned", TUNED, ("nccl",)),
    ("windows", {}, ("nccl window",)),
)


def shapes(sizes: Sequence[int]) -> list[tuple[int, int, bool]]:
    """(values, rows per thread block, to everyone): 128, 48 and 16 thread blocks for each size, and a chain of single words."""
    found = [(2, 2, False)]
    for num_bytes in sizes:
        length = num_bytes // 4
        rows = [length // count for count in (128, 48, 16) if length % count == 0]
        found += [(length, count, everyone) for everyone in (False, True) for count in rows if _fits(count)]
    return found


def _fits(rows: int) -> bool:
    return rows % 32 == 0 if rows >= 32 else rows >= 2 and rows % 2 == 0


def run(
    world_size: int, sizes: Sequence[int], *, steps: int, repeats: int, libraries: bool, kills: int, folder: str | None
) -> bool:
    """Measure, print tables, write them and a picture into `folder`. False: a killed rank held the others up.

    What was measured before an error or an interrupt is printed and written.
    """
    before = machine()
    arguments = {"shapes": shapes(sizes), "steps": steps, "repeats": repeats}
    started = read_rank_variables(os.environ)
    if started is not None and started.source in ("Open MPI", "MPICH"):  # this process is a rank, and only KCCL is measured
        local_rank = started.rank if started.local_rank is None else started.local_rank
        kccl = in_mpi(chains, arguments, local_rank, _DEADLINE_S)
        if kccl is None:
            return True
        world_size, libraries, kills = started.world_size, False, 0
    else:
        require_gpus(world_size)
        kccl = _run(world_size, f"{_KCCL}:chains", arguments, {})[0]
    figures: dict[str, Any] = {"world_size": world_size, "kccl": kccl, "libraries": {}, "kills": []}
    configuration = {"world_size": world_size, "sizes": list(sizes), "steps": steps, "repeats": repeats}
    with finishing("collectives", configuration, before, figures):
        try:
            print("\n".join(kccl_table(figures, sizes)), flush=True)
            for name, environ, methods in _LIBRARIES if libraries else ():
                figures["libraries"][name] = _library(world_size, sizes, environ, methods, repeats)
            print("\n".join(library_table(figures, sizes)), flush=True)
            for _ in range(kills):
                figures["kills"].append(_kill(world_size))
                print(kill_line(figures["kills"][-1]), flush=True)
        finally:
            if folder is not None:
                write(Path(folder), figures, sizes)
    return all(kill["good"] for kill in figures["kills"])


def _library(
    world_size: int, sizes: Sequence[int], environ: Mapping[str, str], methods: Sequence[str], repeats: int
) -> dict[str, Any] | str:
    """Microseconds by method and bytes; the failure of another library is a result, too: a text."""
    try:
        with _store() as store:
            task = {"store": store, "sizes": list(sizes), "methods": list(methods), "repeats": repeats}
            found: dict[str, Any] = _run(world_size, _TORCH, task, environ)[0]
            return found
    except (LaunchError, subprocess.TimeoutExpired) as error:
        return f"{str(error).strip().splitlines()[-1][:300]}"


def _run(world_size: int, body: str, arguments: Mapping[str, object], environ: Mapping[str, str]) -> list[Any]:
    outcomes = run_ranks(world_size, body, arguments, deadline_s=_DEADLINE_S, device="cuda", environ={**ENVIRON, **environ})
    failed = [outcome for outcome in outcomes if outcome.status != 0]
    if failed:
        told = next((outcome for outcome in failed if outcome.error and "AbortedError" not in outcome.error), failed[0])
        raise LaunchError(f"{body} failed on rank {told.rank} (status {told.status}): {told.error}")
    return [outcome.result for outcome in outcomes]


def _kill(world_size: int) -> dict[str, object]:
    """Kill the last rank while all spin; the others must leave within the bound and keep usable GPUs."""
    outcomes = run_ranks(world_size, f"{_KCCL}:killed_while_spinning", deadline_s=60.0, device="cuda", environ=ENVIRON)
    survivors = [outcome.result or {"left_ms": -1.0, "how": outcome.error[-300:], "usable": False} for outcome in outcomes[:-1]]
    good = outcomes[-1].status < 0 and all(
        s["usable"] and s["how"] == "AbortedError" and 0 <= s["left_ms"] <= 100 for s in survivors
    )
    return {"good": good, "survivors": survivors}


@contextmanager
def _store() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kog-bench-") as folder:
        yield os.path.join(folder, "store")
