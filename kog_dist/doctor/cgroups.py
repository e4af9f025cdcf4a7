"""Limits of the control groups (version 2) that this process is in."""

from __future__ import annotations

from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


def limit(name: str, *, mount: Path = _MOUNT, own: Path = Path("/proc/self/cgroup")) -> list[str]:
    """Texts of a limit file such as cpu.max in the own group and all above it; empty where nothing is limited."""
    try:
        path = next(line.split("::", 1)[1] for line in own.read_text(encoding="utf-8").splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    group = mount / path.strip("/")
    found = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            break
        try:
            text = (folder / name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text:
            found.append(text)
    return found
