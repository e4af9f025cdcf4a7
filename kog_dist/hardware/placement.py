"""Where a rank's process runs, as every launcher tells its worker: the CPUs it is pinned to and the GPUs that it may see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kog_dist.errors import ConfigError
from kog_dist.hardware.cpu_lists import parse_cpu_list
from kog_dist.hardware.visible import VARIABLE


@dataclass(frozen=True, slots=True)
class Placement:
    """Part of a worker's arguments. The default changes nothing."""

    cpus: str = ""  # list such as 0-3,8
    gpus: tuple[str, ...] = ()  # UUIDs of all GPUs of the engine, by rank: `cuda:RANK` is the rank's, the others are its peers

    def apply(self) -> None:
        """Pin this process, and show CUDA the engine's GPUs, whatever mask was inherited. Call it before threads and CUDA start.

        Memory follows by itself: Linux gives pages on the NUMA node of the CPU that first touches them. CPUs that this process
        may not use are left out; if none is left it stays where it is.
        """
        if self.gpus:
            os.environ[VARIABLE] = ",".join(self.gpus)
        usable = parse_cpu_list(self.cpus) & os.sched_getaffinity(0)
        if usable:
            os.sched_setaffinity(0, usable)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Placement:
        """The inverse of `asdict` after a journey as JSON. Raises ConfigError."""
        try:
            cpus, gpus = values["cpus"], values["gpus"]
            parse_cpu_list(cpus)
            placement = cls(cpus, tuple(gpus))
        except (AttributeError, KeyError, TypeError, ValueError):
            placement = None
        if placement is None or len(values) != 2 or not all(isinstance(uuid, str) for uuid in placement.gpus):
            raise ConfigError(f"the worker's argument placement must have cpus and gpus, got {values!r}")
        return placement


ANYWHERE = Placement()
