"""Latency of the CPU collectives on this machine: `python -m kog_dist.bench.collectives.cpu [STEPS]`.

The last line is one JSON object. `all_reduce` and `barrier` are per call with all ranks running, medians on rank 0; `publish` and
`collect_ready` are what a call costs when nothing has to be waited for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import numpy as np

from kog_dist.bench.report import finish, machine
from kog_dist.collectives.api import MailboxSpec
from kog_dist.collectives.ranks import RankContext, run_ranks

LENGTH = 256
WORLD_SIZES = (2, 4, 8)


def measure(context: RankContext) -> dict[str, float]:
    """The body of one rank: medians in microseconds."""
    steps = int(context.arguments["steps"])
    comm = context.communicator([MailboxSpec("sum", 2, LENGTH), MailboxSpec("cost", 1, LENGTH)])
    values = np.full(LENGTH, context.info.rank, np.float32)
    timings: dict[str, list[int]] = {"all_reduce": [], "barrier": [], "publish": [], "collect_ready": []}
    for epoch in range(1, steps + 1):
        started = time.perf_counter_ns()
        comm.all_reduce("sum", epoch % 2, epoch, values)
        timings["all_reduce"].append(time.perf_counter_ns() - started)
    for _ in range(steps):
        started = time.perf_counter_ns()
        comm.barrier()
        timings["barrier"].append(time.perf_counter_ns() - started)
    for epoch in range(1, steps // 4 + 1):
        started = time.perf_counter_ns()
        comm.publish("cost", 0, epoch, values)
        timings["publish"].append(time.perf_counter_ns() - started)
        comm.barrier()
        started = time.perf_counter_ns()
        comm.collect("cost", 0, epoch, values)
        timings["collect_ready"].append(time.perf_counter_ns() - started)
        comm.barrier()
    comm.close()
    return {f"{name}_us": round(statistics.median(ns) / 1e3, 1) for name, ns in timings.items()}


def main(steps: int) -> None:
    """All world sizes, one after the other."""
    before = machine()
    figures = {}
    for world_size in WORLD_SIZES:
        outcomes = run_ranks(world_size, "kog_dist.bench.collectives.cpu:measure", {"steps": steps})
        failures = [outcome.error for outcome in outcomes if outcome.status != 0]
        if failures:
            sys.exit(failures[0])
        figures[str(world_size)] = outcomes[0].result
    finish("collectives", {"length": LENGTH, "steps": steps}, before, figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m kog_dist.bench.collectives.cpu", description=__doc__)
    parser.add_argument("steps", metavar="STEPS", nargs="?", type=int, default=1000, help="calls of each kind, at least 4")
    given = parser.parse_args()
    if given.steps < 4:
        parser.error(f"STEPS must be at least 4, got {given.steps}")
    main(given.steps)
