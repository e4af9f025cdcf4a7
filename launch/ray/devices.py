"""Which GPU Ray has given to an actor, by UUID.

Ray hides all GPUs but its own from an actor, and CUDA IPC needs a process to see its peers' GPUs too. So the mask that Ray sets
is not used: the worker, a child of the actor, gets the list of all ranks' UUIDs (`Placement.gpus`), in which `cuda:RANK` is the
actor's own GPU. That holds with and without RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kog_dist.errors import LaunchError
from kog_dist.hardware.gpus import Inventory, read_inventory
from kog_dist.hardware.visible import VARIABLE, visible_gpus


def assigned_gpu(ids: Sequence[str], environ: Mapping[str, str], inventory: Inventory | None = None) -> str:
    """UUID of the GPU whose id (an index or a UUID) Ray has assigned to this actor. Raises LaunchError."""
    inventory = inventory or read_inventory()
    mask = ",".join(ids)
    visible = visible_gpus(inventory.gpus, {**environ, VARIABLE: mask})
    if len(ids) != 1 or len(visible.gpus) != 1:
        why = visible.why or next(iter(inventory.findings), "it is not among this node's GPUs")
        raise LaunchError(f"Ray assigned GPU {mask or 'none'} to this rank, expected one GPU of this node: {why}")
    if visible.gpus[0].has_mig:
        raise LaunchError(f"Ray assigned {visible.gpus[0]}, which is split into MIG instances; the kernel needs a whole GPU")
    return visible.gpus[0].uuid
