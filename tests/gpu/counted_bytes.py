"""Bytes of memory that a token reads, as Nsight Compute counts them: `python -m tests.gpu.counted_bytes SHAPE...`, one GPU.

Beside them what `TapeShape.read_bytes` says of the weights, and `kv_bytes_read` of keys and values. What else a token reads is
small: an embedding, norms, biases, scales that lie behind the tapes.

Each shape has a process of its own (`--run`) under `ncu`: one launch of the monokernel warms up, the next one is counted. One
metric needs one pass, and `--replay-mode application` would repeat the process for a second one: so memory is neither saved nor
restored, and the kernel, which waits for words of its own, runs once from beginning to end. It has no peers.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kog_dist.bench.report import finishing, machine
from kog_dist.errors import KogError, LaunchError

METRIC = "dram__bytes_read.sum"
CONTEXT, TOKENS = 512, 32
_LIMIT_S = 200.0
_NCU = "/usr/local/cuda/bin/ncu"
_OPTIONS = (
    "--replay-mode", "application", "--cache-control", "none", "--clock-control", "none", "--metrics", METRIC, "--kernel-name",
    "regex:^kog_decode$", "--launch-skip", "1", "--launch-count", "1", "--csv", "--print-units", "base",
)  # fmt: skip


def decode(name: str) -> dict[str, Any]:
    """What the counted process does. Returns the bytes of its second launch by computation, and which GPU it had."""
    from kog_dist.bench.kernel.gpu import gpu_name
    from kog_dist.bench.kernel.latency import kv_bytes_read
    from kog_dist.bench.kernel.token_times import token_times_us
    from kog_dist.bench.shapes import SEED, named_shape
    from kog_dist.workers.cuda.kernel_shape import KernelShape
    from kog_dist.workers.cuda.monokernel import Monokernel
    from kog_dist.workers.cuda.random_weights import random_weights

    spec, codings = named_shape(name)
    shape = KernelShape(spec, range(spec.num_lanes), **codings)
    kernel = Monokernel(shape, random_weights(shape, SEED))
    for _ in range(2):  # the first one is not counted
        token_times_us(kernel, CONTEXT, TOKENS)
    kernel.close()
    kv_bytes = sum(kv_bytes_read(shape, CONTEXT + step) for step in range(TOKENS))
    return {"weight_bytes": TOKENS * shape.tape.read_bytes, "kv_bytes": kv_bytes, "gpu": gpu_name()}


def counted(log: str) -> int:
    """The bytes that ncu's CSV says. Raises KogError with all that it says if they are not of one launch."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    rows = [row for row in csv.DictReader(lines) if row.get("Metric Name") == METRIC]
    if len(rows) != 1 or rows[0]["Metric Unit"] != "byte":
        raise KogError(f"ncu was to count the bytes of one launch: {log[-2000:]}")
    return int(float(rows[0]["Metric Value"].replace(",", "")))


def measured(name: str, ncu: str) -> dict[str, Any]:
    """Of a shape, per token. Raises KogError if nothing was counted."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [ncu, *_OPTIONS, "--log-file", str(log), sys.executable, "-m", "tests.gpu.counted_bytes", "--run", name]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:  # fmt: skip
            try:
                printed, _ = process.communicate(timeout=_LIMIT_S)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)  # ncu, and the process that it counts
                raise KogError(f"{name} under ncu took more than {_LIMIT_S:g} s; see what else uses the GPU") from error
        said = log.read_text(errors="replace") if log.exists() else ""
    found = [line for line in printed.splitlines() if line.startswith('{"weight_bytes"')]
    if process.returncode or not found:
        raise KogError(f"{name} under ncu ended with {process.returncode}: {said[-2000:]}{printed[-2000:]}")
    one = json.loads(found[-1])
    num_bytes = counted(said)
    return {
        "spec": name, "gpu": one["gpu"], "context": CONTEXT, "tokens": TOKENS, "weight_bytes": one["weight_bytes"] // TOKENS,
        "kv_bytes": one["kv_bytes"] // TOKENS, "counted_bytes": num_bytes // TOKENS,
        "ratio": num_bytes / (one["weight_bytes"] + one["kv_bytes"]),
    }  # fmt: skip


def run(names: Sequence[str]) -> None:
    """Count and print; the last line is one JSON object."""
    ncu = shutil.which("ncu") or shutil.which(_NCU)
    if ncu is None:
        raise LaunchError(f"Nsight Compute counts the bytes, and there is no ncu in PATH, nor {_NCU}; install it")
    before, figures = machine(), list[dict[str, Any]]()
    with finishing("counted_bytes", {"metric": METRIC}, before, figures):
        for name in names:
            figures.append(one := measured(name, ncu))
            print(
                f"{name}, {one['gpu']}, context {CONTEXT}: {one['weight_bytes'] / 1e6:.1f} MB of weights and "
                f"{one['kv_bytes'] / 1e6:.1f} of keys and values per token computed, {one['counted_bytes'] / 1e6:.1f} counted, "
                f"ratio {one['ratio']:.4f}",
                flush=True,
            )


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """The command line. Exits with code 2 where it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.counted_bytes", description=__doc__)
    parser.add_argument("--run", action="store_true", help="decode, as the process that is counted")
    parser.add_argument("names", nargs="+", metavar="SHAPE", help="shapes of kog-bench latency --spec")
    return parser.parse_args(words)


def main() -> int:
    given = parsed(sys.argv[1:])
    if given.run:
        print(json.dumps(decode(given.names[0])), flush=True)
        return 0
    try:
        run(given.names)
    except KogError as error:
        print(f"Error: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
