"""CPUs that may be used, NUMA nodes and what lies near them, time limits of the container, huge pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kog_dist.doctor.cgroups import limit
from kog_dist.doctor.report import Finding, ok, warning
from kog_dist.hardware.cpu_lists import format_cpu_list
from kog_dist.hardware.cpus import CpuMap, read_cpu_map
from kog_dist.hardware.gpus import Inventory, read_inventory

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cpus() -> Iterator[Finding]:
    """How many, and whether a quota takes some of them away again."""
    machine, present = read_cpu_map(), os.cpu_count() or 1
    usable = len(machine.cpus)
    details = {"cpus": format_cpu_list(machine.cpus), "cores": len(machine.cores), "present": present}
    yield ok(f"{usable} of {present} CPUs may be used ({format_cpu_list(machine.cpus)}), {len(machine.cores)} cores", **details)
    quota = _quota()
    if quota is not None and quota < usable:
        yield warning(
            f"a quota allows the time of {quota:g} CPUs on {usable}, so ranks are stopped in the middle of a token; give whole "
            "CPUs (a cpuset) instead",
            quota=quota,
        )


def numa() -> Iterator[Finding]:
    """The map of nodes, with the GPUs of each."""
    yield _numa(read_cpu_map(), read_inventory())


def _numa(machine: CpuMap, inventory: Inventory) -> Finding:
    parts, details = [], dict[str, dict[str, object]]()
    for node, members in sorted(machine.nodes.items()):
        near = [gpu.index for gpu in inventory.gpus if gpu.cpus & members]
        gpus = f" with GPU {', '.join(map(str, near))}" if near else ""
        parts.append(f"node {node}: CPUs {format_cpu_list(members)}{gpus}")
        details[str(node)] = {"cpus": format_cpu_list(members), "gpus": near}
    far = [gpu.index for gpu in inventory.gpus if gpu.cpus and not gpu.cpus & machine.cpus]
    if far:
        return warning(
            f"no CPU near GPU {', '.join(map(str, far))} may be used, so its rank runs on a far node; widen the cpuset or the "
            f"affinity mask ({'; '.join(parts)})",
            nodes=details,
        )
    return ok(f"NUMA {'; '.join(parts)}" if parts else "the kernel names no NUMA nodes", nodes=details)


def huge_pages() -> Iterator[Finding]:
    """Weights of CPU ranks lie in transparent huge pages where they may."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii")
    except OSError:
        yield warning("transparent huge pages are not offered by this kernel; CPU ranks are slower without them")
        return
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        yield warning(
            f"transparent huge pages are off, which costs CPU ranks a third of their speed; echo madvise > {_HUGE_PAGES}",
            mode=mode,
        )
    else:
        yield ok(f"transparent huge pages: {mode}", mode=mode)


def _quota() -> float | None:
    """CPUs' worth of time, the least of all groups that this process is in."""
    found = [(int(words[0]), int(words[1])) for words in map(str.split, limit("cpu.max")) if words[0] != "max"]
    return min((quota / period for quota, period in found), default=None)
