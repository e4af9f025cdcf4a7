"""All checks at the same time, each in a thread of its own: one that hangs is reported, and costs nothing but its own answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from kog_dist.doctor.report import CheckResult, Finding, warning

LIMIT_S = 15.0  # for all checks together; commands that they start have 10 s

CheckFunction = Callable[[], Iterable[Finding]]


class Check:
    """A named question of an area, and its answer once `run` has ended."""

    def __init__(self, area: str, name: str, function: CheckFunction) -> None:
        self.area, self.name = area, name
        self._function = function
        self._findings: Sequence[Finding] | None = None

    def run(self) -> None:
        """Ask. A check that fails itself is a finding, never an exception."""
        try:
            self._findings = tuple(self._function())
        except ImportError as error:
            self._findings = (warning(f"{self.name} cannot be checked: the package {error.name} is missing; install it"),)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            self._findings = (warning(f"{self.name} could not be checked ({reason}); please report this"),)

    def answer(self, limit_s: float) -> CheckResult:
        """What was found; a warning if the check has not ended."""
        late = warning(f"{self.name} did not answer within {limit_s:g} s; what it asks hangs, and so may an engine that needs it")
        return CheckResult(self.area, self.name, (late,) if self._findings is None else self._findings)


def run_checks(checks: Sequence[Check], limit_s: float = LIMIT_S) -> tuple[list[CheckResult], bool]:
    """Answers in the order of `checks`, and whether all have ended; threads of those that hang go on until the process ends."""
    threads = [threading.Thread(target=check.run, name=check.name, daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, until_s - time.monotonic()))
    return [check.answer(limit_s) for check in checks], not any(thread.is_alive() for thread in threads)
