"""`kog-chat`: the entry point. It imports nothing but `signal` until Ctrl-C is safe; the flags are in `chat/flags.py`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run `kog-chat` and exit with its code; until an answer is asked for, Ctrl-C ends the process silently.

    Also where whoever started it ignores Ctrl-C, as a shell does for what a script runs in the background.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kog_dist.chat.flags import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
