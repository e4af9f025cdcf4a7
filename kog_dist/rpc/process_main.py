"""The `main` of processes that speak RPC and that `kog-launch` starts with one JSON argument: router, gateway, coordinator."""

from __future__ import annotations

import sys
from collections.abc import Callable

from kog_dist.errors import KogError, LaunchError, sentence_of


def serve_argument(role: str, started_by: str, serve: Callable[[str], int]) -> int:
    """The exit code of `serve(argument)`, or of a KogError, which becomes one line on stderr.

    `started_by` says to a person who called the module by hand what to do instead.
    """
    try:
        if len(sys.argv) != 2:
            raise LaunchError(f"the {role} takes one argument, a JSON object; {started_by}")
        return serve(sys.argv[1])
    except (KogError, MemoryError) as error:
        print(f"{role}: {sentence_of(error)}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", LaunchError.exit_code)
