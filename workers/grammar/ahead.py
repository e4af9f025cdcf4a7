"""The grammar process before anybody needs it: `python -m kog_dist.workers.grammar.ahead JSON`, arguments as those of `process`.

It reads the vocabulary in a thread of the least priority, and then serves in one of ordinary priority, which a process that has
given its priority up could not have again.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import os
import sys
from typing import Final

from kog_dist.system.python_child import begin_helper

_LEAST: Final = 19


def main() -> int:
    """Serve until the coordinator is gone. Returns the exit code."""
    given = json.loads(sys.argv[1])
    if not begin_helper(given["parent_pid"], given["memory_bytes"]):
        return 0  # the coordinator was gone before it could be watched
    with concurrent.futures.ThreadPoolExecutor(1, initializer=_give_way) as thread:
        process = thread.submit(importlib.import_module, "kog_dist.workers.grammar.process").result()
        args = process.GrammarArgs.from_json(sys.argv[1])
        made = thread.submit(process.prepare, args)
        concurrent.futures.wait([made])
    code: int = process.serve(args, lambda _args: made.result())
    return code


def _give_way() -> None:
    """For the calling thread alone, which is what Linux calls a process here."""
    os.setpriority(os.PRIO_PROCESS, 0, _LEAST)


if __name__ == "__main__":
    sys.exit(main())
