"""Programs that checks start: bounded, with an empty standard input, and never a traceback."""

from __future__ import annotations

import subprocess

from kog_dist.system import python_child

TIMEOUT_S = 10.0


def output_of(*command: str) -> str | None:
    """What a command prints on stdout and stderr, None when it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def python_output(program: str) -> str | None:
    """What a Python program prints in a process of its own, so that a library that hangs or crashes harms nobody."""
    return output_of(*python_child.interpreter("-c", program))
