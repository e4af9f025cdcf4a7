"""Lists of CPUs as the kernel writes them: `0-3,8,10-11`."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers of a list; the empty text is the empty set. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """The shortest list of these numbers."""
    ordered, parts = sorted(set(cpus)), list[str]()
    start = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            first, last = ordered[start], ordered[place - 1]
            parts.append(f"{first}" if first == last else f"{first}-{last}")
            start = place
    return ",".join(parts)
