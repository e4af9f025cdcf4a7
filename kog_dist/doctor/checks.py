"""All checks, in the order in which they are shown."""

from __future__ import annotations

from kog_dist.doctor import (
    caches,
    compilers,
    gpus,
    instances,
    limits,
    links,
    memory,
    mpi,
    network,
    processors,
    ray_state,
    software,
)
from kog_dist.doctor.runner import Check


def all_checks() -> list[Check]:
    """Fresh ones: a check is asked once."""
    areas = {
        "Software": {"python": software.python, "packages": software.packages, "torch": software.torch_build},
        "CUDA": {
            "driver": gpus.driver, "cupy": compilers.cupy, "compiler": compilers.compiler, "kernel cache": compilers.cubin_cache,
        },
        "GPUs": {
            "devices": gpus.devices, "visible": gpus.visible, "nvlink": links.nvlink, "peer access": links.peer_access,
            "fabric": links.fabric,
        },
        "CPUs": {"cpus": processors.cpus, "numa": processors.numa, "huge pages": processors.huge_pages,
                 "16-bit products": compilers.host_library},
        "Memory": {
            "available": memory.available, "memfd": memory.unnamed_shared, "/dev/shm": memory.named_shared,
            "locked memory": memory.locked,
        },
        "Disk": {"rounded weights": caches.rounded_weights},
        "Limits": {
            "open files": limits.open_files, "processes": limits.processes, "address space": limits.address_space,
            "pidfd": limits.supervision,
        },
        "Launchers": {"mpi": mpi.mpi, "ray": ray_state.ray},
        "Service": {"loopback": network.loopback, "settings": network.settings, "instances": instances.instances},
    }  # fmt: skip
    return [Check(area, name, function) for area, checks in areas.items() for name, function in checks.items()]
