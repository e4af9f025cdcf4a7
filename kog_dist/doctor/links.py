"""How GPUs reach each other: NVLink, the switch fabric, and which pairs may read and write each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from kog_dist.doctor.report import Finding, ok, warning
from kog_dist.hardware.gpus import Gpu, inventory_from
from kog_dist.hardware.nvml import NvmlUnavailable, nvml_session
from kog_dist.hardware.peers import peer_access as reach


def nvlink() -> Iterator[Finding]:
    """Links that are up, of those that a GPU has."""
    for nvml, gpus in _several_gpus():
        states = {gpu.index: _links(nvml, gpu) for gpu in gpus}
        up = {index: sum(links) for index, links in states.items()}
        details = {"links_up": up, "links": {index: len(links) for index, links in states.items()}}
        if not any(states.values()):
            yield warning("these GPUs have no NVLink, so sums between ranks go over PCIe, which is far slower", **details)
        elif down := [index for index, links in states.items() if sum(links) < max(up.values()) or not sum(links)]:
            names = ", ".join(f"GPU {index} ({up[index]} of {len(states[index])} up)" for index in down)
            yield warning(f"NVLinks are down: {names}; look at nvidia-smi nvlink -s and have the machine serviced", **details)
        else:
            yield ok(f"NVLink: {max(up.values())} links up on each of {len(gpus)} GPUs", **details)


def peer_access() -> Iterator[Finding]:
    """The matrix of pairs: rw, r, w or nothing."""
    for nvml, gpus in _several_gpus():
        matrix = {gpu.index: {peer.index: reach(nvml, gpu.index, peer.index) for peer in gpus if peer is not gpu} for gpu in gpus}
        blocked = [f"{i}-{j}" for i, row in matrix.items() for j, access in row.items() if access != "rw"]
        if blocked:
            shown = ", ".join(blocked[:8]) + (f" and {len(blocked) - 8} more" if len(blocked) > 8 else "")
            yield warning(
                f"these pairs of GPUs cannot read and write each other's memory: {shown}; one engine on several GPUs needs all "
                "pairs: choose others, or look at nvidia-smi topo -p2p rw",
                matrix=matrix,
            )
        else:
            yield ok(f"peer access: all {len(gpus) * (len(gpus) - 1)} pairs of {len(gpus)} GPUs read and write", matrix=matrix)


def fabric() -> Iterator[Finding]:
    """Whether GPUs on an NVSwitch have been registered by the fabric manager; without it CUDA does not start."""
    for nvml, gpus in _several_gpus():
        states = {gpu.index: _fabric_state(nvml, gpu) for gpu in gpus}
        known = {index: state for index, state in states.items() if state is not None}
        waiting = [index for index, ready in known.items() if not ready]
        if waiting:
            yield warning(
                f"the NVSwitch fabric has not taken in GPU {', '.join(map(str, waiting))}; start nvidia-fabricmanager",
                waiting=waiting,
            )
        elif known:
            yield ok("NVSwitch fabric: all GPUs registered")


def _several_gpus() -> Iterator[tuple[ModuleType, tuple[Gpu, ...]]]:
    """The binding and the GPUs, once, where there are at least two."""
    try:
        with nvml_session() as nvml:
            gpus = inventory_from(nvml).gpus
            if len(gpus) > 1:
                yield nvml, gpus
    except NvmlUnavailable:
        return


def _links(nvml: ModuleType, gpu: Gpu) -> list[bool]:
    handle, states = nvml.nvmlDeviceGetHandleByIndex(gpu.index), list[bool]()
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(bool(nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except nvml.NVMLError:
            break  # the GPU has no more
    return states


def _fabric_state(nvml: ModuleType, gpu: Gpu) -> bool | None:
    """None where there is no fabric, or the driver does not know."""
    answer = nvml.c_nvmlGpuFabricInfo_t()
    try:
        nvml.nvmlDeviceGetGpuFabricInfo(nvml.nvmlDeviceGetHandleByIndex(gpu.index), answer)
    except nvml.NVMLError:
        return None
    if answer.state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        return None
    return bool(answer.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and answer.status == 0)
