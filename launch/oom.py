"""Whether the kernel's out-of-memory killer was at work where a process ran: a control group counts whom it has lost to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

KILLED: Final = "was killed by the system's out-of-memory killer (free memory, or raise the limit of its control group)"
_LOOK_EVERY_S: Final = 5.0
_MOUNT: Final = Path("/sys/fs/cgroup")


class OomKills:
    """Of the control group that a process is in. Call `look` often, so that an earlier death of somebody else does not count."""

    def __init__(self, pid: int, *, mount: Path = _MOUNT, proc: Path = Path("/proc")) -> None:
        self._files = list(_counters(pid, mount, proc))
        self._before = self._lately = self._count()
        self._looked_s = time.monotonic()

    def look(self) -> None:
        """Forget what is longer ago than a few seconds."""
        if (now_s := time.monotonic()) - self._looked_s > _LOOK_EVERY_S:
            self._before, self._lately, self._looked_s = self._lately, self._count(), now_s

    def has_risen(self) -> bool:
        """Whether somebody was killed in the last seconds."""
        return self._count() > self._before

    def _count(self) -> int:
        return sum(map(_oom_kills, self._files))


def _counters(pid: int, mount: Path, proc: Path) -> Iterator[Path]:
    """Files of versions 2 and 1. A container may see its group as the root."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not controllers:
            names, roots = ["memory.events.local", "memory.events"], (mount, mount / "unified")
        elif "memory" in controllers.split(","):
            names, roots = ["memory.oom_control"], (mount / "memory", mount / controllers)
        else:
            continue
        places = (folder / name for root in roots for folder in (root / path.strip("/"), root) for name in names)
        yield from [place for place in places if place.exists()][:1]


def _oom_kills(path: Path) -> int:
    try:
        words = path.read_text(encoding="ascii").split()
        return int(words[words.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0
