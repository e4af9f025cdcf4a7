"""The processes between this one and mpirun: without them the engine must not go on, whoever has killed them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kog_dist.errors import ConfigError
from kog_dist.runtime.rank_env import RankVariables, read_rank_variables


def starter_lifelines(found: RankVariables) -> dict[int, str]:
    """Pidfds, and names, of the parent and of its parents up to the one that made this process a rank.

    Those that have the same rank variables are wrappers, such as a shell between mpirun and kog-launch.
    """
    lifelines: dict[int, str] = {}
    pid = os.getppid()
    with contextlib.suppress(OSError):  # one that has just ended or belongs to somebody else: the others are watched
        while pid > 1:
            lifelines[os.pidfd_open(pid)] = f"{_name(pid)} (pid {pid})"
            if _rank_variables(pid) != found:
                break
            pid = _parent(pid)
    return lifelines


def _rank_variables(pid: int) -> RankVariables | None:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    environ = {name: value for name, _, value in (word.partition("=") for word in words)}
    try:
        return read_rank_variables(environ)
    except ConfigError:
        return None


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[1])
