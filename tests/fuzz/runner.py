"""Runs fuzz targets, each in a process of its own, and says what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.bounds import MAX_STUCK_S, ROOT, CasePage

TARGETS = tuple(sorted(path.stem for path in (Path(__file__).parent / "targets").glob("*.py")))
PLANTED = "planted"  # a target with every kind of finding, for the test of this runner
_START_S = 60.0  # to import and instrument a target, on a busy machine


@dataclass(frozen=True)
class Outcome:
    """What a target's run came to. `findings`: what went wrong, each with the file that holds its input."""

    target: str
    cases: int
    seconds: float
    findings: tuple[str, ...]

    def __str__(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9) * 60
        return f"{self.target:<20} {self.cases:>10,} cases {rate:>12,.0f}/min {len(self.findings):>3} findings"


def run_target(name: str, seconds: float, seed: int, folder: Path) -> Outcome:
    """Replay a target's corpus, then fuzz it for `seconds`. Findings and what the corpus grew by are kept in `folder`."""
    findings, grown = folder / "findings", folder / "grown"
    for made in (findings, grown):
        made.mkdir(parents=True, exist_ok=True)
    for old in (folder / "case", folder / "done.json", *findings.iterdir()):
        old.unlink(missing_ok=True)
    page = CasePage(folder / "case")
    module = f"tests.fuzz.{name}" if name == PLANTED else f"tests.fuzz.targets.{name}"
    command = [sys.executable, "-m", "tests.fuzz.child", module, str(folder), str(seconds), str(seed), str(grown)]
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log, tempfile.TemporaryDirectory(prefix="kog-fuzz-", dir=_in_memory()) as scratch:
        environment = {**os.environ, **single, "TMPDIR": scratch}  # a target never removes what it makes
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        with _ended(child):
            stuck = _watch(child, page)
    if not (folder / "done.json").exists():
        why = "does not end" if stuck else f"ends its process with status {child.returncode}"
        (findings / "last").write_bytes(page.data)
        tail = (folder / "log").read_text(errors="replace")[-4000:]
        (findings / "last.txt").write_text(f"an input that {why}\n{tail}\n")
        cases, ran_s = page.num_cases, seconds
    else:
        done = json.loads((folder / "done.json").read_text())
        cases, ran_s = done["cases"], done["seconds"]
    told = (f"{path.with_suffix('')}: {path.read_text()}" for path in sorted(findings.glob("*.txt")))
    return Outcome(name, cases, ran_s, tuple(told))


def _in_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@contextmanager
def _ended(child: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        child.kill()
        child.wait()


def _watch(child: subprocess.Popen[bytes], page: CasePage) -> bool:
    """Wait for the end of a target; True if one input kept it for too long."""
    seen, since = -1, time.monotonic()
    while True:
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:
            pass
        else:
            return False
        if page.num_cases != seen:
            seen, since = page.num_cases, time.monotonic()
        elif time.monotonic() - since > (MAX_STUCK_S if seen else _START_S):
            return True
