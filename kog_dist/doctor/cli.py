"""`kog-doctor`: looks at this machine and says what keeps an engine from starting or makes it slow. Changes and starts nothing.

Needs nothing but the standard library: it must work where packages are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from kog_dist import __version__
from kog_dist.rpc.output import OutputError, check_stdout, quoted_streams, write_error
from kog_dist.system.standard_streams import fill_closed

_DESCRIPTION = """\
Look at this machine: Python and packages, CUDA, GPUs and their links, CPUs and NUMA, memory, limits, MPI, Ray, ports,
instance folders. Each line is ok, a warning (stops some engines, or costs speed) or a problem (no engine can start
here). Changes nothing, and can run beside an engine. Exit codes: 0 no problem, 1 a problem, 2 usage, 3 no output."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `kog-doctor` and exit with its code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code, all_ended = 0, True
    fill_closed()
    try:
        with quoted_streams():
            check_stdout()
            as_json: bool = parser().parse_args(arguments).json
            from kog_dist.doctor import report
            from kog_dist.doctor.checks import all_checks
            from kog_dist.doctor.runner import run_checks

            answers, all_ended = run_checks(all_checks())
            code = report.exit_code(answers)
            with contextlib.suppress(BrokenPipeError):  # whoever reads it has enough
                print(report.as_json(answers) if as_json else report.as_text(answers), flush=True)
    except OutputError as error:
        write_error(f"kog-doctor: {error}")
        code = error.exit_code
    if not all_ended:
        os._exit(code)  # a thread that hangs in a driver would hold the process up
    sys.exit(code)


def parser() -> argparse.ArgumentParser:
    """Its command line."""
    made = argparse.ArgumentParser("kog-doctor", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="one JSON object on stdout, with all details")
    made.add_argument("--version", action="version", version=f"kog_dist {__version__}", help="show the version")
    return made


if __name__ == "__main__":
    main()
