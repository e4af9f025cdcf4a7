"""pytest in a process that has imported what is slow to import: each run is a fork of it, which imports the product anew.

Started as a script in the tree whose tests it runs, with modules to import: none of the product, which a mutant may change.
Takes one JSON object a line, `{"arguments": [...], "limit_s": 9.0, "environ": {}}`, and answers with one: the exit code of pytest
(null if it took too long), the test that failed first, and what was printed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPTIONS = ("-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")
PAUSE_S = 0.01


class First:
    """A plugin that notes the first test that fails, and why."""

    failed = ""
    words = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed, self.words = report.nodeid, report.longreprtext

    pytest_collectreport = pytest_runtest_logreport


def forked(work: Callable[[], tuple[int, First]], limit_s: float) -> dict[str, Any]:
    """What `work` makes in a fork, which is not waited for beyond a limit: exit code, first failed test, and what it printed."""
    with tempfile.TemporaryDirectory(prefix="kog-mutant-") as folder:
        printed, note = Path(folder, "printed"), Path(folder, "failed")
        printed.touch()
        if (pid := os.fork()) == 0:
            _be_child(work, printed, note)
        end_s, status = time.monotonic() + limit_s, None
        while status is None and time.monotonic() < end_s:
            found, ended = os.waitpid(pid, os.WNOHANG)
            if found:
                status = ended
            else:
                time.sleep(PAUSE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the tests have left behind, too
        if status is None:
            os.waitpid(pid, 0)
        failed, _, words = (note.read_text() if note.exists() else "").partition("\n")
        return {
            "code": None if status is None else os.waitstatus_to_exitcode(status),
            "failed": failed,
            "printed": f"{printed.read_text(errors='replace')}{words}"[-20000:],
        }


def _be_child(work: Callable[[], tuple[int, First]], printed: Path, note: Path) -> None:
    """Work, and never return."""
    code = 70
    try:
        os.setsid()
        with printed.open("wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code, first = work()
        note.write_text(f"{first.failed}\n{first.words}")
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def run(arguments: list[str], limit_s: float, environ: dict[str, str]) -> dict[str, Any]:
    """Run pytest in a fork."""

    def work() -> tuple[int, First]:
        os.environ.update(environ)
        import pytest

        first = First()
        return int(pytest.main([*OPTIONS, *arguments], plugins=[first])), first

    return forked(work, limit_s)


def main() -> None:
    """Answer lines until there are no more."""
    sys.path[0] = os.getcwd()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    replies = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        replies.write(json.dumps(run(**json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
