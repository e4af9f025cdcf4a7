"""What `kog-bench scaling --model` is fitted to, out of what benchmarks have printed or written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.foreign_file import read_text
from kog_dist.records import dataclass
from kog_dist.workers.cuda.kernel_shape import MAX_CTAS


@dataclass
class Measured:
    """Microseconds per token by hosted lanes of one GPU and by number of GPUs; None: not measured."""

    lanes_us: dict[int, float] = field(default_factory=dict)
    gpus_us: dict[int, float] = field(default_factory=dict)
    stream_kb_per_us: float | None = None  # of a thread block: the ceiling
    peer_hop_us: float | None = None


def measured_in(paths: Sequence[Path], context: int) -> Measured:
    """Figures of `kog-bench latency`, `scaling` and `collectives` at this context: files with their output, whose last JSON
    object counts. Raises ConfigError for a file without one, and for one of another benchmark.
    """
    found = Measured()
    for path in paths:
        report = _report(path)
        figures = report["figures"]
        if report["benchmark"] == "latency":
            at = [figure for figure in figures if figure.get("context") == context and "ceiling_us" in figure]
            found.lanes_us |= {figure["lanes"]: figure["us_per_token"] for figure in at}
            for figure in at:
                rate = figure["tape_bytes"] / MAX_CTAS / figure["ceiling_us"] / 1000
                found.stream_kb_per_us = max(rate, found.stream_kb_per_us or 0.0)
        elif report["benchmark"] == "scaling":
            at = [figure for figure in figures if figure.get("context") == context and "p99_us" in figure]
            found.gpus_us |= {figure["gpus"]: figure["us_per_token"] for figure in at if "sampling" not in figure}
        else:
            found.peer_hop_us = next((entry["median_us"] for entry in figures["kccl"] if entry["length"] == 2), None)
    return found


def _report(path: Path) -> dict[str, Any]:
    try:
        lines = read_text(path).splitlines()
        report: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith('{"benchmark"')))
    except OSError as error:
        raise ConfigError(f"--measured {path}: {error.strerror or error}") from None
    except (StopIteration, ValueError):
        raise ConfigError(f"--measured {path} has no line with the JSON object that ends a benchmark") from None
    if report["benchmark"] not in ("latency", "scaling", "collectives"):
        raise ConfigError(f"--measured {path} is of kog-bench {report['benchmark']}; latency, scaling and collectives are of use")
    return report
