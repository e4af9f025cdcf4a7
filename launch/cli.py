"""`kog-launch`: the entry point. It imports next to nothing until Ctrl-C is safe; the flags are in `launch/flags.py`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run `kog-launch` and exit with its code; until the supervisor takes over, Ctrl-C ends the process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the launcher forks, and computes nothing
    from kog_dist.python_child import harden

    harden()
    from kog_dist.launch.flags import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
