"""`kog-doctor`: looks at this machine and says what keeps an engine from starting or makes it slow. Changes and starts nothing.

Needs nothing but the standard library: it must work where packages are missing.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

_DESCRIPTION = """\
Look at this machine: Python and packages, CUDA, GPUs and their links, CPUs and NUMA, memory, limits, MPI, Ray, ports,
instance folders. Each line is ok, a warning (stops some engines, or costs speed) or a problem (no engine can start
here). Changes nothing, and can run beside an engine. Exit codes: 0 no problem, 1 a problem, 2 usage."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kog-doctor` and exit with its code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parser = argparse.ArgumentParser("kog-doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with all details")
    as_json = parser.parse_args(arguments).json
    from kog_dist.doctor import report
    from kog_dist.doctor.checks import all_checks
    from kog_dist.doctor.runner import run_checks

    answers, all_ended = run_checks(all_checks())
    try:
        print(report.as_json(answers) if as_json else report.as_text(answers), flush=True)
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not all_ended:
        os._exit(report.exit_code(answers))  # a thread that hangs in a driver would hold the process up
    sys.exit(report.exit_code(answers))


if __name__ == "__main__":
    main()
