"""The process that runs one fuzz target: started by `runner`, with a limit on its memory. Never imports kog_dist by itself.

A finding does not end it: the input is saved, once for each line of code that it came from.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import atheris

from tests.fuzz.bounds import (
    ADDRESS_SPACE_BYTES,
    CORPUS,
    MAX_CPU_S,
    MAX_GROWTH_BYTES,
    MAX_INPUT_BYTES,
    ROOT,
    CasePage,
)

_STATUS_FD = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
_LIBRARY_TIMEOUT_S = 3600  # the runner watches the time; 0 would not mean none, but end the process after a second


class Cases:
    """Runs the inputs of a target, and keeps what went wrong."""

    def __init__(self, target: ModuleType, folder: Path, seconds: float) -> None:
        self._target = target
        self._folder = folder
        self._page = CasePage(folder / "case")
        self._known: set[str] = set()
        self._ends_at = time.monotonic() + seconds
        self._begun = time.monotonic()
        self._peak_bytes = _peak_bytes()

    def one(self, data: bytes) -> None:
        """Run one input; ends the process when the time is over."""
        if time.monotonic() >= self._ends_at:
            self.end()
        self.checked(data)

    def checked(self, data: bytes) -> None:
        """Run one input and keep it if it broke a promise."""
        self._page.begin(data)
        begun_s = time.process_time()
        try:
            self._target.one_input(data)
        except Exception as error:
            self._keep(data, _origin(error), "".join(traceback.format_exception(error))[-4000:])
        took_s, peak_bytes = time.process_time() - begun_s, _peak_bytes()
        if took_s > MAX_CPU_S:
            self._keep(data, "slow", f"took {took_s:.2f} s of processor time, more than {MAX_CPU_S}")
        if peak_bytes - self._peak_bytes > MAX_GROWTH_BYTES:
            self._keep(data, "memory", f"took {(peak_bytes - self._peak_bytes) >> 20} MiB")
        self._peak_bytes = max(peak_bytes, self._peak_bytes)

    def end(self) -> NoReturn:
        """Tell how many cases there were, and end the process: libFuzzer would not return."""
        seconds = time.monotonic() - self._begun
        (self._folder / "done.json").write_text(json.dumps({"cases": self._page.num_cases, "seconds": seconds}))
        sys.stdout.flush()
        os._exit(0)

    def _keep(self, data: bytes, origin: str, text: str) -> None:
        if origin in self._known:
            return
        self._known.add(origin)
        path = self._folder / "findings" / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"{origin}\n{text}\n", errors="backslashreplace")


def _origin(error: BaseException) -> str:
    """Kind of error and the last line of this repository that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "?"
    return f"{type(error).__name__} at {place}"


def _peak_bytes() -> int:
    """Most memory that this program has had. Not ru_maxrss: that begins with the peak of whoever started the process."""
    status = os.pread(_STATUS_FD, 4096, 0)
    return int(status[status.index(b"VmHWM:") + 6 :].split(None, 1)[0]) << 10


def _limit_memory() -> None:
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + ADDRESS_SPACE_BYTES, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(module: str, folder: Path, seconds: float, seed: int, grown: Path) -> None:
    """Replay the corpus of a target, then make inputs until `seconds` are over; without seconds the corpus is all."""
    corpus = CORPUS / module.rpartition(".")[2]
    with atheris.instrument_imports(include=["kog_dist", "tomllib"], enable_loader_override=False):
        target = importlib.import_module(module)
    _limit_memory()
    cases = Cases(target, folder, seconds)
    for path in sorted(corpus.iterdir()):
        cases.checked(path.read_bytes())
    if seconds <= 0:
        cases.end()
    options = [
        f"-seed={seed}", f"-max_len={MAX_INPUT_BYTES}", "-rss_limit_mb=0", f"-timeout={_LIBRARY_TIMEOUT_S}",
        f"-artifact_prefix={folder}/", "-print_final_stats=0",
    ]  # fmt: skip
    hooks: dict[str, Any] = {"custom_mutator": target.mutate} if hasattr(target, "mutate") else {}
    atheris.Setup([module, *options, str(grown), str(corpus)], cases.one, **hooks)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
