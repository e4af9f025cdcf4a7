"""Processor time of what `make test` does: wall time says how busy the machine is, core-seconds what a check costs.

`python -m tests.core_seconds GROUP COMMAND...` runs a command and notes what it and its children have used; without arguments it
prints the table of all groups since the last time. Not counted: processes that nobody waits for, such as detached engines.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

NOTES = Path(__file__).parents[1] / "build" / "core-seconds"


def used_s() -> float:
    """Seconds of processors that this process has used, and children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def count(group: str, command: list[str], notes: Path = NOTES) -> int:
    """Run a command to its end, whatever a terminal sends meanwhile; its exit code."""
    begin_s = time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command's own business
    code = process.wait()
    notes.mkdir(parents=True, exist_ok=True)
    note = {"group": group, "core_s": round(used_s(), 1), "wall_s": round(time.monotonic() - begin_s, 1), "code": code}
    (notes / f"{group}.json").write_text(json.dumps(note))
    return code if code >= 0 else 128 - code


def table(notes: Path = NOTES) -> list[str]:
    """A line for each group, the most expensive first, and their sum. The notes are gone then."""
    found = [json.loads(path.read_text()) for path in notes.glob("*.json")]
    for path in notes.glob("*.json"):
        path.unlink()
    found.sort(key=lambda note: -note["core_s"])
    lines = [f"{note['core_s']:8.1f} {note['wall_s']:8.1f} s  {note['group']}" for note in found]
    return ["core-seconds, wall, group", *lines, f"{sum(note['core_s'] for note in found):8.1f}             all"]


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(count(sys.argv[1], sys.argv[2:]))
    print("\n".join(table()))
