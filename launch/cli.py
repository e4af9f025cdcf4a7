"""`kog-launch`: the entry point. It imports next to nothing until Ctrl-C is safe; the flags are in `launch/flags.py`."""

from __future__ import annotations

import os
import resource
import signal
import sys

_LEAST_ADDRESS_SPACE = 256 << 20  # below it libraries end the process before anybody could say why
_EXIT_CANNOT_START = 3


def main() -> None:
    """Run `kog-launch` and exit with its code; until the supervisor takes over, Ctrl-C ends the process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the launcher forks, and computes nothing
    from kog_dist.system.python_child import harden

    harden()
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_ADDRESS_SPACE:
        least = _LEAST_ADDRESS_SPACE >> 10
        print(f"kog-launch: too little memory is allowed; raise its limit (ulimit -v) to {least} KiB or more", file=sys.stderr)
        sys.exit(_EXIT_CANNOT_START)
    from kog_dist.launch.flags import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
