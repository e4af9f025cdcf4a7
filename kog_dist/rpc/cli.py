"""`kog-client`: the entry point. It imports nothing but `signal` until Ctrl-C is safe; the flags are in `rpc/flags.py`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run `kog-client` and exit with its code; until a request is under way, Ctrl-C ends the process silently."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kog_dist.rpc.flags import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
