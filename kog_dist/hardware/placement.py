"""Where a rank's process runs, as every launcher tells its worker: the CPUs it is pinned to and the GPUs that it may see."""

from __future__ import annotations

import os

from kog_dist.errors import ConfigError
from kog_dist.hardware.cpu_lists import parse_cpu_list
from kog_dist.hardware.visible import VARIABLE
from kog_dist.records import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Part of a worker's arguments. The default changes nothing."""

    cpus: str = ""  # list such as 0-3,8
    gpus: tuple[str, ...] = ()  # UUIDs of all GPUs of the engine, by rank: `cuda:RANK` is the rank's, the others are its peers

    def __post_init__(self) -> None:
        try:
            parse_cpu_list(self.cpus)
        except ValueError:
            raise ConfigError(f"the CPUs of a placement must be a list such as 0-3,8, got {self.cpus!r}") from None

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


ANYWHERE = Placement()
