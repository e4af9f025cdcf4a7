"""CPUs that this process may use: physical cores and NUMA nodes, from sysfs. cpusets of cgroups show in the affinity mask."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from kog_dist.hardware.cpu_lists import parse_cpu_list
from kog_dist.records import dataclass

_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class CpuMap:
    """Cores (hardware threads that share one) in the order of nodes, and the CPUs of each NUMA node; only what may be used."""

    cores: tuple[frozenset[int], ...]
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)

    @property
    def cpus(self) -> frozenset[int]:
        """All of them."""
        return frozenset().union(*self.cores)

    def nodes_of(self, cpus: Iterable[int]) -> tuple[int, ...]:
        """The NUMA nodes that a set of CPUs lies on."""
        wanted = frozenset(cpus)
        return tuple(node for node, members in sorted(self.nodes.items()) if wanted & members)


def read_cpu_map() -> CpuMap:
    """The machine as this process may use it. Where sysfs says nothing, every CPU is a core of its own."""
    allowed = frozenset(os.sched_getaffinity(0))
    siblings = {cpu: _read_list(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") for cpu in allowed}
    nodes = {int(path.name[4:]): _read_list(path / "cpulist") & allowed for path in _NODES.glob("node[0-9]*")}
    return cpu_map(siblings, {node: cpus for node, cpus in nodes.items() if cpus})


def cpu_map(siblings: Mapping[int, frozenset[int]], nodes: Mapping[int, frozenset[int]]) -> CpuMap:
    """The map of these CPUs (the keys), given the hardware threads that share a core with each."""
    known = frozenset(siblings)
    cores = {(siblings[cpu] & known) | {cpu} for cpu in siblings}
    node_of = {cpu: node for node, cpus in nodes.items() for cpu in cpus}
    ordered = sorted(cores, key=lambda core: (node_of.get(min(core), -1), min(core)))
    return CpuMap(tuple(ordered), dict(nodes))


def share_cpus(near: Sequence[frozenset[int]], machine: CpuMap) -> tuple[frozenset[int], ...]:
    """CPUs of each rank, from the CPUs near its GPU (empty: unknown).

    Ranks with the same near CPUs divide the cores among them evenly, neighbours next to each other; with fewer cores than ranks
    they all have all of these. A rank whose near CPUs are unknown, or none of which may be used, gets the empty set: not pinned.
    """
    usable = [cpus & machine.cpus for cpus in near]
    shares: list[frozenset[int]] = []
    for rank, cpus in enumerate(usable):
        group = [peer for peer, theirs in enumerate(usable) if theirs == cpus]
        cores = [core & cpus for core in machine.cores if core & cpus]
        # Sets that overlap without being equal cannot be divided by counting heads; their ranks share them.
        overlaps = any(theirs & cpus and theirs != cpus for theirs in usable)
        if len(cores) < len(group) or overlaps:
            shares.append(cpus)
            continue
        place = group.index(rank)
        own = cores[place * len(cores) // len(group) : (place + 1) * len(cores) // len(group)]
        shares.append(frozenset().union(*own))
    return tuple(shares)


def _read_list(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return frozenset()
