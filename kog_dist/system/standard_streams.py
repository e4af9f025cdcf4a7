"""Standard streams that whoever started this process has closed."""

from __future__ import annotations

import os
import sys


def fill_closed() -> frozenset[int]:
    """Put /dev/null in the place of closed standard descriptors, whose numbers other files would take; which ones were closed.

    Reading finds an end, and errors go nowhere. `sys.stdout` stays None, so that a command can say that it has none.
    """
    closed = set()
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
            closed.add(fd)
    if 0 in closed:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if 2 in closed:
        sys.stderr = os.fdopen(
            2, "w", encoding="utf-8", closefd=False
        )  # Python left it None, and print would take stdout for that
    return frozenset(closed)
